"""Whether a page can be used by everybody: by keys alone, in the dark, on a narrow phone, by a screen reader.

`check_…` each ask a tab of Chromium; `tabbed` walks through the page by the key Tab, as who has no mouse does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page

Opened = Callable[..., Page]  # `opened("#device=d3", width=…, dark=…)`: what follows the address, and as Browser.open
LEAST_CONTRAST, PHONE_PX = 4.5, 360  # WCAG 2.2, 1.4.3; 1.4.10 asks for 320, the project for 360
_CONTROLS = {"button", "checkbox", "combobox", "link", "searchbox", "textbox"}
_OTHERS = {"dialog", "form", "group", "image", "img", "region", "search"}  # which a reader goes to by their names

_CONTRAST = """(() => {
  const parsed = (text) => {
    const found = text.match(/^rgba?\\(([^)]+)\\)$/);
    if (!found) throw new Error(`no colour: ${text}`);
    const [r, g, b, a = 1] = found[1].split(",").map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const light = (colour) => {
    const linear = (part) => (part / 255 <= 0.04045 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => { // the body's ground is opaque
    const colour = parsed(getComputedStyle(element).backgroundColor);
    return colour[3] === 1 || !element.parentElement ? colour : over(colour, behind(element.parentElement));
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const [text, element] = [walker.currentNode.data.trim(), walker.currentNode.parentElement];
    if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest("script, :disabled")) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) opacity *= Number(getComputedStyle(each).opacity);
    const ink = parsed(element.closest("svg") ? style.fill : style.color);
    ink[3] *= opacity;
    const [a, b] = [light(over(ink, ground)), light(ground)].sort((x, y) => y - x);
    found.push([Number(((a + 0.05) / (b + 0.05)).toFixed(2)), text.slice(0, 40), style.color]);
  }
  return found;
})()"""

_ITS = ("in", "id", "text", "href")
_BEYOND = """[...document.querySelectorAll("body *")].filter((e) => e.checkVisibility()
    && !e.parentElement.closest(".scroll, svg") && e.getBoundingClientRect().right > innerWidth + 0.5)
    .map((e) => e.outerHTML.slice(0, 200))"""

_FOCUS = """(() => {
  const element = document.activeElement;
  if (!element || element === document.body) return null;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  const seen = [0.1, 0.5, 0.9].map((part) => {
    const there = document.elementFromPoint(box.x + box.width * part, box.y + Math.min(box.height / 2, 20));
    return Boolean(there) && (element.contains(there) || there.contains(element));
  });
  return {
    tag: element.tagName.toLowerCase(), id: element.id, text: element.textContent.trim().slice(0, 60),
    data: {...element.dataset}, href: element.getAttribute("href"), in: element.closest("[id]")?.id ?? "",
    outline: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth),
    uncovered: seen.includes(true),
  };
})()"""


@contextmanager
def tabs(browser: Browser, url: str, ready: str) -> Iterator[Opened]:
    """Opens tabs of a page, each once `ready` holds in it, and closes them in the end."""
    with ExitStack() as all_of_them:

        def opened(at: str = "", **given: Any) -> Page:
            page = browser.open(f"{url}{at}", **given)
            all_of_them.callback(page.close)
            page.until(ready)
            return page

        yield opened


def contrasts(page: Page) -> list[tuple[float, str]]:
    """The contrast of each text that is seen with what lies behind it, and its beginning; not of disabled controls."""
    return [(float(ratio), f"{text} ({colour})") for ratio, text, colour in page.run(_CONTRAST)]


def check_contrast(page: Page) -> None:
    """Every text can be read."""
    found = contrasts(page)
    assert len(found) > 2
    assert [each for each in found if each[0] < LEAST_CONTRAST] == []


def check_width(page: Page) -> None:
    """Nothing lies beyond the right edge: no scrolling from side to side, but in what says that it scrolls."""
    wide, width = page.run("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= width
    assert (
        page.run("""[...document.querySelectorAll("body *")].filter((e) => e.checkVisibility()
        && !e.closest(".scroll, svg") && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML)""")
        == []
    )


def tree(page: Page, *, within: float = 20.0) -> list[dict[str, Any]]:
    """What a screen reader is given: role, name and properties of each node that it sees.

    A browser builds its tree after it has drawn the page, part by part. So it is read until it has controls, where the
    page has any, and two readings are the same.
    """
    page.ask("Accessibility.enable")
    controls = page.run('!!document.querySelector("button, a[href], input, select, textarea")?.checkVisibility()')
    before, until = _read_tree(page), time.monotonic() + within
    while True:
        time.sleep(0.1)
        found = _read_tree(page)
        if found == before and (not controls or any(node["role"] in _CONTROLS for node in found)):
            return found
        assert time.monotonic() < until, f"the tree still changes, or lacks the page's controls: {len(found)} nodes"
        before = found


def _read_tree(page: Page) -> list[dict[str, Any]]:
    found = []
    for node in page.ask("Accessibility.getFullAXTree")["nodes"]:
        if not node["ignored"]:
            properties = {each["name"]: each["value"].get("value") for each in node.get("properties", ())}
            name = node.get("name", {}).get("value", "")
            found.append({"role": node["role"]["value"], "name": name, **properties})
    return found


def check_names(page: Page) -> None:
    """Every control has a role and a name, and whatever takes the focus is one or is named."""
    nodes = tree(page)
    controls = [node for node in nodes if node["role"] in _CONTROLS]
    assert len(controls) > 2
    nameless = [node for node in nodes if node["role"] in _CONTROLS | _OTHERS and not node["name"].strip()]
    assert nameless == [], nameless
    focused = {node["role"] for node in nodes if node.get("focusable")}
    assert focused <= _CONTROLS | {"RootWebArea", "region", "heading"}


def check_axe(page: Page) -> None:
    """axe-core finds nothing; skips where its package is not installed, fails in CI."""
    spec = find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        why = "no axe-core, try pip install axe-core-python"
        pytest.fail(why) if os.environ.get("PROTOFLEET_CI") else pytest.skip(why)
    page.run(Path(str(spec.origin)).with_name("axe.min.js").read_text("utf-8") + "; 0")
    found = page.run("axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"]
    seen = [(one["id"], one["help"], [node["html"][:120] for node in one["nodes"]]) for one in found["violations"]]
    assert seen == []


def tabbed(page: Page, *, back: bool = False, most: int = 500) -> Iterator[dict[str, Any]]:
    """What has the focus after each press of Tab, until it has left the page; it is marked, and seen at least in part.

    The next press comes once a frame was drawn: a long table draws its next rows when the focus has scrolled it.

    Args:
        back: with the shift key.
    """
    first: dict[str, Any] | None = None
    for _ in range(most):
        page.key("Tab", shift=back)
        found = page.run(f"new Promise((done) => requestAnimationFrame(() => setTimeout(() => done({_FOCUS}))))")
        if found is None or (first and [found[key] for key in _ITS] == [first[key] for key in _ITS]):
            return
        first = first or found
        assert found["outline"] >= 2, found
        assert found["uncovered"], found
        yield found
    raise AssertionError(f"more than {most} stops")


def focused(page: Page) -> dict[str, Any] | None:
    """What has the focus; None where it is the page itself."""
    return page.run(_FOCUS)
