"""The documentation as a site: every page in it, no link or anchor that leads nowhere, nothing loaded from elsewhere.

What builds it needs the extra docs, which CI has in an environment of its own; what checks it does not.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Page

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "site"
sys.path.insert(0, str(ROOT / "docs" / "site"))

import blocks  # noqa: E402
import check_links  # noqa: E402
import site_pages  # noqa: E402

# ── what needs nothing ──────────────────────────────────────────────────────────────────────────────────────────────


def test_every_page_of_docs_is_in_the_navigation_once() -> None:
    parts = site_pages.navigation((ROOT / "docs/index.md").read_text())
    listed = [page for items in parts.values() for _, page in items]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(site_pages.all_pages())
    below = ("docs/decisions/", "results/")  # these belong to the index of their folder
    expected = {page for page in site_pages.all_pages() if page.endswith("README") or not page.startswith(below)}
    assert set(listed) == expected - {site_pages.FIRST}


def test_every_decision_belongs_to_a_topic() -> None:
    folder = ROOT / "docs/decisions"
    topics = site_pages.topics((folder / "README.md").read_text())
    assert topics.keys() == {page.stem for page in folder.glob("[0-9]*.md")}


def test_the_anchor_of_a_topic_is_the_one_that_the_index_links_to() -> None:
    text = (ROOT / "docs/decisions/README.md").read_text()
    for title, anchor in re.findall(r"^- \[(.+)\]\(#(.+)\)$", text, re.MULTILINE):
        assert site_pages.slug(title) == anchor


def test_a_page_of_the_site_has_no_syntax_that_only_the_site_reads() -> None:
    for page in site_pages.all_pages():
        text = re.sub(r"^```\w*\n.*?^```", "", (ROOT / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in text.splitlines():
            assert not line.startswith(("```{", ":::", "!!!", "{%", "(#")), f"{page}: {line}"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ('<a href="other.html">', "other.html, expected a file of the site"),
        ('<a href="#there">', "#there, expected that anchor"),
        ('<a href="two.html#there">', "two.html#there, expected that anchor"),
        ('<a href="http://example.org/">', "expected https"),
        ('<img src="https://example.org/picture.png">', "loads https://example.org/picture.png"),
        ('<script src="//example.org/script.js"></script>', "loads //example.org/script.js"),
        ('<link rel="stylesheet" href="https://fonts.googleapis.com/css">', "loads https://fonts"),
        ('<style>@import "https://example.org/font.css"</style>', "loads https://example.org/font.css"),
    ],
)
def test_what_leads_nowhere_or_is_elsewhere_is_named(tmp_path: Path, page: str, said: str) -> None:
    (tmp_path / "two.html").write_text('<p id="here">')
    (tmp_path / "one.html").write_text(f'<h1 id="top">{page}')
    found = list(check_links.faults(tmp_path))
    assert len(found) == 1
    assert found[0].startswith("one.html")
    assert said in found[0]


def test_what_is_there_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "style.css").write_text("p { background: url('data:image/svg+xml,x') }")
    (tmp_path / "below/two.html").write_text('<link href="../style.css"><a href="../one.html#privacy-%CE%B5">')
    (tmp_path / "one.html").write_text('<h1 id="privacy-ε"><a href="below/two.html"><a href="https://example.org/#x">')
    assert list(check_links.faults(tmp_path)) == []
    (tmp_path / "style.css").write_text("@font-face { src: url(https://example.org/font.woff2) }")
    assert list(check_links.faults(tmp_path)) == ["style.css: loads https://example.org/font.woff2"]


def test_a_folder_without_a_site_is_a_fault(tmp_path: Path) -> None:
    assert len(list(check_links.faults(tmp_path))) == 1


def test_the_script_says_what_it_lacks_and_never_empties_another_folder(tmp_path: Path) -> None:
    none = {**os.environ, "PYTHON": "/usr/bin/false"}
    done = subprocess.run([SCRIPT], env=none, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: scripts/site, expected /usr/bin/false with the extra docs, got none, try ")
    (tmp_path / "photo.jpg").write_text("of somebody")
    all_there = {**os.environ, "PYTHON": "/usr/bin/true"}
    done = subprocess.run([SCRIPT, tmp_path], env=all_there, capture_output=True, text=True)
    assert done.returncode == 1
    assert "expected no folder, an empty one or an older site" in done.stderr
    assert (tmp_path / "photo.jpg").exists()


def table(*rows: tuple[str, ...]) -> str:
    head, *body = ["".join(f"<{tag}><p>{cell}</p></{tag}>" for cell in row) for tag, row in _tagged(rows)]
    lines = "".join(f'<tr class="row-even">{row}</tr>' for row in body)
    return f'<table class="docutils"><thead><tr class="row-odd">{head}</tr></thead><tbody>{lines}</tbody></table>'


def _tagged(rows: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    return (("td" if number else "th", row) for number, row in enumerate(rows))


def test_a_cell_of_a_table_that_does_not_fit_a_phone_names_its_column() -> None:
    long = "some words that go on and on"
    wide = table(("", "who & <em>what</em>", "why"), ("one", long, long), ("two", long, "x"))
    found = blocks.blocks(f"<p>before</p>{wide}<p>after</p>")
    assert re.findall('data-label="(.*?)"', found) == ["who &amp; what", "why"] * 2
    assert found.count('role="cell"') == 6
    assert found.count('<tr role="row"') == 2
    assert '<table role="table" class="blocks docutils">' in found
    assert (
        re.sub(r' (?:role|data-label)="[^"]*"', "", found).replace("blocks ", "") == f"<p>before</p>{wide}<p>after</p>"
    )


def test_a_table_that_fits_a_phone_stays_a_table() -> None:
    narrow = table(("", "rows", "median", "p90"), ("all published rows", "412", "5.6 %", "31.5 %"))
    assert blocks.blocks(narrow) == narrow
    uneven = table(("a", "b", "c"), ("x" * 30, "x" * 30))
    assert blocks.blocks(uneven) == uneven


# ── what builds it ──────────────────────────────────────────────────────────────────────────────────────────────────

pytestmark = pytest.mark.timeout(1800)  # all of it is built within a fixture
MODULES = ("sphinx", "myst_parser", "furo", "latex2mathml")
installed = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in MODULES), reason="the extra docs is not installed here"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as a reader of scripts/site builds it."""
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([SCRIPT, folder], env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files, and no word about them."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where it is served."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@installed
def test_every_page_is_built_with_no_warning_and_no_dead_link(site: Path) -> None:
    built = {file.relative_to(site).with_suffix("").as_posix() for file in site.rglob("*.html")}
    assert built == {*site_pages.all_pages(), "index", "search"}


@installed
def test_a_formula_is_elements_and_no_script_draws_it(site: Path) -> None:
    text = (site / "docs/methods.html").read_text()
    assert text.count("<math ") >= 5
    assert "mathjax" not in text.lower()
    assert "katex" not in text.lower()


@installed
def test_a_formula_with_an_unknown_command_stops_the_build() -> None:
    import mathml

    assert mathml.mathml(r"\bar{c}_j", block=False).startswith("<math ")
    with pytest.raises(ValueError, match=r"latex2mathml knows, got \\nosuch in"):
        mathml.mathml(r"\nosuch{x}", block=True)


@installed
def test_a_page_of_a_folder_says_to_which_index_it_belongs(site: Path) -> None:
    decision = next(site.glob("docs/decisions/285-*.html")).read_text()
    assert 'href="README.html#tests-ci-and-packaging"' in decision
    assert 'class="above"><a href="README.html">' in (site / "results/factor.html").read_text()


@installed
def test_a_search_finds_pages_before_decisions_and_nothing_comes_from_elsewhere(address: str, browser: Browser) -> None:
    page = browser.open(f"{address}search.html?q=gateway")
    page.until("document.querySelectorAll('#search-results li a').length > 5")
    first = page.run("document.querySelector('#search-results li a').getAttribute('href')")
    assert first.split("?")[0].split("#")[0] == "docs/gateway.html"
    assert first_party(page, address)


@installed
@pytest.mark.parametrize("name", ["docs/index.html", "docs/methods.html", "docs/security.html", "results/README.html"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_a_phone_in_light_and_in_dark(address: str, browser: Browser, name: str, dark: bool) -> None:
    page = browser.open(address + name, width=400, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= 400
    for table in ("table.blocks", ".blocks tr", ".blocks td"):
        assert page.run(f"getComputedStyle(document.querySelector('{table}') || document.body).display") == "block"
    colour = page.run("getComputedStyle(document.querySelector('.content')).color")
    shade = [int(each) for each in re.findall(r"\d+", colour)[:3]]
    assert (min(shade) > 128) == dark
    assert first_party(page, address)


def first_party(page: Page, address: str) -> bool:
    """Whether all that the page has loaded came from there."""
    loaded = json.loads(page.run("JSON.stringify(performance.getEntriesByType('resource').map(each => each.name))"))
    assert loaded
    return all(each.startswith((address, "data:")) for each in loaded)
