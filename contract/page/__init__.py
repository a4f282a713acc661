"""A page in a browser, served by Python's own HTTP server: what the device's page and the operator's have in common.

`page_address` is where it is, `visitors` says who may come in, `site` is what a page shows, `page_server` speaks HTTP.
`shared.css` and `shared.js` are of every page; `pair.html` asks for the pairing code.
"""
