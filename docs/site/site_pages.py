"""Which files are pages of the site, and how one gets from one to the other.

The navigation is docs/index.md itself: each of its sections is a part of it, and each list item that begins with a link
a page. A page that is not in it belongs to the index of its folder, `docs/decisions/README.md` or
`results/README.md`, and says so in a line above its title.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = "docs/index"
PATTERNS = (
    "*.md",
    "docs/*.md",
    "docs/decisions/*.md",
    "results/*.md",
    "deploy/README.md",
    "kernels/README.md",
    "photos/README.md",
)


def all_pages() -> list[str]:
    """Every page, by its path without the suffix."""
    found = [path for pattern in PATTERNS for path in ROOT.glob(pattern)]
    return sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in found)


def navigation(index: str) -> dict[str, list[tuple[str, str]]]:
    """Of docs/index.md: its sections, each with (what the link says, page) of its items."""
    parts = {}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        items = re.findall(r"^- \[(.+?)\]\(([^)#]+)\.md\)", section, re.MULTILINE)
        if items:
            title = section.splitlines()[0]
            parts[title] = [(said, posixpath.normpath(posixpath.join("docs", page))) for said, page in items]
    return parts


def toctrees(parts: dict[str, list[tuple[str, str]]]) -> str:
    """The navigation as Sphinx reads it."""
    blocks = []
    for title, items in parts.items():
        lines = "\n".join(f"{said} </{page}>" for said, page in items)
        blocks.append(f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{lines}\n```\n")
    return "".join(blocks)


def topics(index: str) -> dict[str, str]:
    """Of an index with a section for each topic: the topic of each page, by its file's name."""
    found = {}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        for name in re.findall(r"^\| \[\d+\]\(([^)]+)\.md\)", section, re.MULTILINE):
            found[name] = section.splitlines()[0]
    return found


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def setup(app) -> None:
    """Add all this to Sphinx."""
    from sphinx import addnodes  # what stands above this function needs nothing

    listed = {page for items in navigation((ROOT / f"{FIRST}.md").read_text()).values() for _, page in items}
    topic = topics((ROOT / "docs/decisions/README.md").read_text())

    def read(app, docname: str, source: list[str]) -> None:
        if docname == FIRST:
            source[0] += toctrees(navigation(source[0]))
        elif docname not in listed:
            app.env.metadata[docname]["orphan"] = True  # it is in no toctree, and that is meant

    def folders(app, doctree) -> None:
        """A link to a folder of code is its text alone: a site has no folders to look into."""
        here = ROOT / posixpath.dirname(app.env.docname)
        for node in list(doctree.findall(addnodes.pending_xref)):
            if node["reftype"] == "myst" and (here / node["reftarget"]).is_dir():
                node.replace_self(node.children)

    def page(app, docname: str, template: str, context: dict, doctree) -> None:
        folder, _, name = docname.rpartition("/")
        if doctree is None or docname in listed or f"{folder}/README" not in listed:
            return
        up = app.builder.get_relative_uri(docname, f"{folder}/README")
        title = app.env.titles[f"{folder}/README"].astext()
        line = f'<a href="{up}">{html.escape(title)}</a>'
        if folder == "docs/decisions":
            line += f' › <a href="{up}#{slug(topic[name])}">{html.escape(topic[name])}</a>'
        context["body"] = f'<p class="above">{line}</p>\n{context["body"]}'

    def finished(app, error) -> None:
        """The folder's own first page goes on to docs/index.html."""
        if error is None and app.builder.name == "html":
            first = f"{FIRST}.html"
            Path(app.outdir, "index.html").write_text(
                f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{app.config.project}</title>\n'
                f'<meta http-equiv="refresh" content="0; url={first}"><p><a href="{first}">{first}</a></p></html>\n'
            )

    app.connect("source-read", read)
    app.connect("doctree-read", folders)
    app.connect("html-page-context", page)
    app.connect("build-finished", finished)
