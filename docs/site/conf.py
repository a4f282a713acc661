"""Sphinx's settings: the repository's Markdown, as it stands, as a site. `scripts/site` builds it (docs/decisions/285).

    pages         which files are pages, and what of them stands in the site's navigation
    mathml        formulas, typeset while the site is built
    blocks        tables that do not fit a phone
    check_links   what the built folder links to and loads

The sources stay plain GitHub Markdown: what only a site has, its navigation and where a page belongs, is added here.
"""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import blocks  # noqa: E402
import mathml  # noqa: E402
import site_pages  # noqa: E402

project = "Protofleet"
author = copyright = "The Protofleet authors"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = site_pages.FIRST
include_patterns = list(site_pages.PATTERNS)
exclude_patterns = ["protofleet", "tests", "build", ".*"]  # folders that have no page; links to the rooms among them

# GitHub's dialect and nothing beside it: text that looks like MyST's own syntax is text.
myst_heading_anchors = 6
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role", "substitution"]
myst_fence_as_directive = ["math"]
smartquotes = False  # `--option` stays two dashes
suppress_warnings = ["myst.header"]  # a page may begin with `##`, as those that are shown elsewhere do
nitpicky = True

html_theme = "furo"
html_title = f"Protofleet {version}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "search_order.js")
html_copy_source = html_show_sourcelink = html_use_index = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "friendly", "github-dark"


def setup(app):
    """Connect what the modules beside this file add."""
    site_pages.setup(app)
    mathml.setup(app)
    blocks.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
