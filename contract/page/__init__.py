"""A page in a browser, served by Python's own HTTP server: what the device's page and the operator's have in common.

`page_address` is where it is, `visitors` says who may come in, `site` is what a page shows, `html_page` makes its HTML,
`page_server` speaks HTTP. `frame.html` and `shared.css` are of every page, `head.html` and `shared.js` of those with a
script; `pair.html` asks for the pairing code.
"""
