"""Charts as SVG text, for every report and for files of their own: plain numbers in, one `<svg>` out.

A chart loads nothing, and is `WIDTH` units wide: it fills a phone, and two stand side by side on a
screen. Colours and letters are CSS classes of `style.css`, which pages and files of their own both carry, light and
dark. Every mark that has a number has a `<title>`, which browsers show on hover and screen readers read; `marks.js`,
which is in each page, tells it on a tap and by keys, too.
"""
