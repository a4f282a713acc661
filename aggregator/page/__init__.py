"""The operator's page: a fleet in a browser. Off unless `aggregate --page` or `watch --page` asks.

`fleet_content` is what is shown, made of a look at the store; `fleet_page` looks again and again, and says what has
changed; `standing_comparison` compares the sums that stand, now and then; `page_orders` says who may give which orders;
`served_page` puts them together. `page.html`, `page.js` and `page.css` are given to a browser, with what is common to
all pages (`contract/page/`), and the parts of `runbook.md`, which is docs/runbook.md.
"""
