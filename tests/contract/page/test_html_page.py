"""One frame and one head for the device's page, the operator's page and the pairing form."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from protofleet.contract.page.html_page import filled, form_page, site_page

ROOT = Path(__file__).parents[3]
SITES = ("protofleet.edge_client.page", "protofleet.aggregator.page")
OWN_HEAD = re.compile(r"<!doctype|<html|<head>|<meta|<link|<script|<body", re.IGNORECASE)


class Elements(HTMLParser):
    """All elements of a page, and its title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.title = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "title":
            self.title += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.mark.parametrize("package", SITES)
def test_a_page_has_the_common_head_and_its_own_body(package: str) -> None:
    page = Elements(site_page(package, "orchard", "fleet", '{"token": "t"}'))
    assert page.title.startswith("orchard – fleet")
    assert [page.of(tag) for tag in ("html", "head", "body")] == [[{"lang": "en"}], [{}], [{}]]
    assert {"charset": "utf-8"} in page.of("meta")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert [each["href"] for each in page.of("link")] == ["/shared.css", "/page.css"]
    assert [each.get("src") for each in page.of("script")] == [None, "/shared.js", "/page.js"]
    assert page.of("h1")


def test_the_form_has_the_same_frame_and_no_script() -> None:
    page = Elements(form_page("the terminal", '<p role="alert">No.</p>'))
    assert page.title.startswith("Pairing code")
    assert [each["href"] for each in page.of("link")] == ["/shared.css"]
    assert page.of("script") == []
    assert {"role": "alert"} in page.of("p")
    assert "The code stands at the terminal." in form_page("the terminal", "")


def test_no_page_has_a_head_of_its_own() -> None:
    bodies = [ROOT / room / "page" / "page.html" for room in ("edge_client", "aggregator")]
    for path in (*bodies, ROOT / "contract" / "page" / "pair.html"):
        assert not OWN_HEAD.search(path.read_text("utf-8")), path


@pytest.mark.parametrize("title", ["{{first}}", "{{body}}", "</title><script>alert(1)</script>", '"><img src=x>'])
@pytest.mark.parametrize("package", SITES)
def test_what_is_put_in_is_text_and_no_place(package: str, title: str) -> None:
    first = json.dumps({"token": "t", "name": "</script><script>alert(1)</script>{{title}}{{body}}&amp;"})
    text = site_page(package, title, "fleet", first)
    page = Elements(text)
    assert page.title.startswith(title)
    assert len(page.of("script")) == 3
    assert page.of("img") == []
    assert json.loads(re.findall(r'id="first">(.*?)</script>', text)[0]) == json.loads(first)
    assert text.count('id="first"') == 1


def test_a_place_that_nobody_fills_is_an_error() -> None:
    assert filled("{{a}} {{b c}}", {"a": "{{b c}}", "b c": "1"}) == "{{b c}} 1"
    with pytest.raises(KeyError):
        filled("{{a}}", {})
