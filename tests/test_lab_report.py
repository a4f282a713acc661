"""Charts and report: numbers land where they should, texts are escaped, and the page needs nothing from outside."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from lab.reporting.charts import Line, Row, byte_bars, curves, heatmap, holdings, nice_bytes, strips

SVG = "{http://www.w3.org/2000/svg}"


def _marks(svg: str, kind: str, style: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter(SVG + kind) if style in each.get("class", "")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12 B"), (999, "999 B"), (4270, "4.3 kB"), (74603, "74.6 kB"), (1_687_336, "1.7 MB"), (1e9, "1 GB")],
)
def test_nice_bytes(value: float, text: str) -> None:
    assert nice_bytes(value) == text


def test_strip_dots_stand_in_the_order_of_their_values() -> None:
    svg = strips([Row("a", "local", 0.7, (0.65, 0.75), "part"), Row("b", "fed", 0.8, (0.78, 0.82))])
    places = [float(dot.get("cx", "")) for dot in (*_marks(svg, "circle", "c-local"), *_marks(svg, "circle", "c-fed"))]
    assert sorted(places) == [places[0], places[2], places[1], places[3], places[5], places[4]]
    low, high = 0.65, 0.75
    assert places[2] == pytest.approx((places[0] + places[1]) / 2, abs=0.11), (low, high)


def test_a_curve_with_a_gap_skips_it_and_higher_is_up() -> None:
    svg = curves([Line("a", "fed", [0.5, None, 0.9])], ["1", "2", "3"], "t")
    (line,) = _marks(svg, "polyline", "s-fed")
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    assert len(points) == 2
    assert points[1][0] > points[0][0]
    assert points[1][1] < points[0][1]


def test_a_heatmaps_cells_are_shares_of_their_row() -> None:
    svg = heatmap([[3, 1], [0, 8]], ["x", "y"], "ffc", "t")
    tips = [cell.findtext(SVG + "title") for cell in _marks(svg, "rect", "cell")]
    assert tips == [
        "x answered as x: 75.0 %",
        "x answered as y: 25.0 %",
        "y answered as x: 0.0 %",
        "y answered as y: 100.0 %",
    ]


def test_areas_of_holdings_are_in_proportion_to_samples() -> None:
    svg = holdings(["d"], [[400, 100, 0]], ["a", "b", "c"])
    sides = [float(rect.get("width", "")) for rect in _marks(svg, "rect", "c-fed")]
    assert sides[0] == pytest.approx(2 * sides[1], abs=0.1)
    assert len(sides) == 2
    assert "none" in svg


def test_byte_bars_are_logarithmic() -> None:
    svg = byte_bars([("a", "fed", 1e3), ("b", "ffc", 1e4), ("c", "local", 1e6)])
    widths = [float(_marks(svg, "rect", f"c-{kind}")[0].get("width", "")) for kind in ("fed", "ffc", "local")]
    assert widths[2] - widths[1] == pytest.approx(2 * (widths[1] - widths[0]), abs=0.2)


def test_texts_are_escaped() -> None:
    name = "<script>alert(1)</script>"
    for svg in (
        heatmap([[1, 0], [0, 1]], [name, "y"], "fed", name),
        holdings([name], [[1, 2]], [name, "y"]),
        byte_bars([(name, "fed", 10.0)]),
        strips([Row(name, "fed", 0.5)]),
    ):
        ElementTree.fromstring(svg)
        assert "<script" not in svg
