"""The device's own page: what its camera sees, for its owner to name, in a browser. Off unless `client --page` asks.

`device_page` is what is shown and what a tap does; `visitors` says who may come in; `page_server` speaks HTTP.
`page.html`, `page.js` and `page.css` are all that a browser is given, from this device alone.
"""
