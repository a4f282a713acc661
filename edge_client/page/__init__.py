"""The device's own page: what its camera sees, for its owner to name, in a browser. Off unless `client --page` asks.

`device_page` is what is shown and what a tap does. `page.html`, `page.js` and `page.css` are given to a browser, with
what is common to all pages (`contract/page/`), from this device alone.
"""
