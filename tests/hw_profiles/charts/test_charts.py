"""Charts: numbers land where they should, names stay in the frame, texts are escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from page_checks import check_chart

from protofleet.hw_profiles.charts.bars import Bar, Interval, bars, byte_bars, intervals
from protofleet.hw_profiles.charts.curves import Event, Line, curves
from protofleet.hw_profiles.charts.grids import heatmap, holdings
from protofleet.hw_profiles.charts.marks import STYLE, WIDTH, standalone
from protofleet.hw_profiles.charts.scatter import JOULES, Mark, Point, roofline, scatter
from protofleet.hw_profiles.charts.strips import Row, strips
from protofleet.hw_profiles.charts.timeline import Stretch, Track, timeline
from protofleet.hw_profiles.units import nice_bytes, nice_joules, percent, size, time_text

SVG = "{http://www.w3.org/2000/svg}"


def _marks(svg: str, kind: str, style: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter(SVG + kind) if style in each.get("class", "")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12, "12 B"), (999, "999 B"), (4270, "4.3 kB"), (74603, "74.6 kB"), (1_687_336, "1.7 MB"), (1e9, "1 GB")],
)
def test_nice_bytes(value: float, text: str) -> None:
    assert nice_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0005, "0.5 mJ"), (0.668, "0.668 J"), (114.58, "115 J"), (1200.0, "1.2 kJ")]
)
def test_nice_joules(value: float, text: str) -> None:
    assert nice_joules(value) == text


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


def test_an_event_stands_at_its_x_with_its_mark_and_words() -> None:
    line = Line("a", "fed", [0.5, 0.6, 0.9])
    svg = curves([line], ["1", "2", "3"], "t", axis="day", events=[Event(1, "7", "<it> happened")])
    check_chart(svg)
    (mark,) = _marks(svg, "circle", "c-event")
    (rule,) = _marks(svg, "line", "event")
    assert mark.findtext(SVG + "title") == "<it> happened"
    middle = _marks(svg, "circle", "c-fed")[1]
    assert mark.get("cx") == rule.get("x1") == rule.get("x2") == middle.get("cx")
    assert float(mark.get("cy", "")) < min(float(each.get("cy", "")) for each in _marks(svg, "circle", "c-fed"))
    assert ">day</text>" in svg
    assert "event" not in curves([line], ["1", "2", "3"], "t")


def test_a_timelines_bars_lie_where_their_days_are() -> None:
    bars = [Stretch(1, 1, "fed", "one day"), Stretch(3, 4, "ffc", "two days")]
    svg = timeline([Track("a", 1, 4, bars, [(3, "a cross")]), Track("b", 2, 3)], 1, 4, "t", axis="day")
    check_chart(svg)
    (one,), (two,) = (_marks(svg, "rect", f"c-{kind}") for kind in ("fed", "ffc"))
    start, wide = (float(one.get(name, "")) for name in ("x", "width"))
    step = (float(two.get("width", "")) - wide) / 1
    assert float(two.get("x", "")) == pytest.approx(start + 2 * step, abs=0.2)
    (cross,) = _marks(svg, "g", "cross")
    assert cross.findtext(SVG + "title") == "a cross"
    rails = _marks(svg, "line", "rail")
    assert float(rails[0].get("x1", "")) == pytest.approx(start, abs=0.1)
    assert float(rails[1].get("x1", "")) == pytest.approx(start + step, abs=0.2)


def test_a_heatmaps_cells_are_shares_of_their_row() -> None:
    svg = heatmap([[3, 1], [0, 8]], ["x", "y"], "ffc", "t")
    tips = [cell.findtext(SVG + "title") for cell in _marks(svg, "rect", "cell")]
    assert tips == [
        "x answered as x: 75.0\u00a0%",
        "x answered as y: 25.0\u00a0%",
        "y answered as x: 0.0\u00a0%",
        "y answered as y: 100.0\u00a0%",
    ]


def test_areas_of_holdings_are_in_proportion_to_samples() -> None:
    svg = holdings(["d"], [[400, 100, 0]], ["a", "b", "c"])
    sides = [float(rect.get("width", "")) for rect in _marks(svg, "rect", "c-fed")]
    assert sides[0] == pytest.approx(2 * sides[1], abs=0.1)
    assert len(sides) == 2
    assert "none" in svg
    many = holdings(["d"], [[400, *[0] * 9]], list("abcdefghij"))
    assert "none" not in many, "ten columns have no room for the word"
    assert many.count("–") == 9


def test_byte_bars_are_logarithmic() -> None:
    svg = byte_bars([("a", "fed", 1e3), ("b", "ffc", 1e4), ("c", "local", 1e6)])
    widths = [float(_marks(svg, "rect", f"c-{kind}")[0].get("width", "")) for kind in ("fed", "ffc", "local")]
    assert widths[2] - widths[1] == pytest.approx(2 * (widths[1] - widths[0]), abs=0.2)


def test_the_parts_of_a_bar_stand_end_to_end_on_one_scale() -> None:
    svg = bars([Bar("a", {"p": 1.0, "q": 3.0}), Bar("b", {"p": 2.0, "q": 0.0}, "half")], unit="ms")
    first, rest, second = (
        each for each in ElementTree.fromstring(svg).iter(SVG + "rect") if each.findtext(SVG + "title")
    )
    assert float(first.get("width", "")) == pytest.approx(WIDTH / 4, abs=0.1)
    assert float(rest.get("x", "")) == pytest.approx(WIDTH / 4, abs=0.1)
    assert float(rest.get("width", "")) == pytest.approx(3 * WIDTH / 4, abs=0.1)
    assert float(second.get("width", "")) == pytest.approx(WIDTH / 2, abs=0.1)
    assert rest.findtext(SVG + "title") == "a, q: 3 ms"
    assert "half" in svg
    assert ">4<" in svg  # a's own total


def test_an_interval_is_a_bar_with_a_whisker_where_it_is_known() -> None:
    svg = intervals([Interval("a", "1", 10, 1, 100, "10 ms"), Interval("b", "3", 10, None, None, "10 ms")], "t")
    ((whisker,), (bar, other)) = _marks(svg, "path", "whisker"), _marks(svg, "rect", "c-")
    assert bar.get("width") == other.get("width")
    start, end = float(whisker.get("d", "")[1:].split()[0]), float(whisker.get("d", "").split("H")[1].split("m")[0])
    assert (start + end) / 2 == pytest.approx(float(bar.get("width", "")), abs=0.1)
    assert whisker.findtext(SVG + "title") == "a: 10 ms, from 1 ms to 100 ms"


def test_a_roof_bends_where_memory_no_longer_holds_back() -> None:
    svg = roofline([Point("conv", 10.0, 50.0)], 100.0, 10.0, "board")
    ((roof,), (point,)) = _marks(svg, "polyline", "roof"), _marks(svg, "circle", "thin")
    corner = tuple(map(float, roof.get("points", "").split()[1].split(",")))
    assert corner[0] == pytest.approx(float(point.get("cx", "")), abs=0.1)  # 100 / 10 = 10 per byte
    assert corner[1] < float(point.get("cy", ""))
    assert roofline([], 100.0, 10.0, "board") == ""


def test_a_point_further_right_sends_more_and_nothing_sent_is_left_of_all() -> None:
    svg = scatter([Mark("a", "fed", 0, 0.5), Mark("b", "ffc", 1e4, 0.6), Mark("c", "pooled", 1e6, 0.7)], "t")
    (a,), (b,), (c,) = (_marks(svg, "circle", f"c-{kind}") for kind in ("fed", "ffc", "pooled"))
    assert float(a.get("cx", "")) < float(b.get("cx", "")) < float(c.get("cx", ""))
    assert float(a.get("cy", "")) > float(b.get("cy", "")) > float(c.get("cy", ""))


def test_joules_are_an_axis_like_bytes_and_none_stands_there_only_where_something_costs_nothing() -> None:
    svg = scatter([Mark("a", "fed", 0.5, 0.5), Mark("b", "ffc", 150.0, 0.6)], "t", JOULES)
    assert "joules of one device" in svg
    assert "0.1 J" in svg
    assert ">none<" not in svg
    assert ">none<" in scatter([Mark("a", "fed", 0, 0.5)], "t")


def _charts(name: str) -> dict[str, str]:
    """Every chart, with one name for everything."""
    many = [Mark(f"{name} {i}", "fed", 3e6, 0.5 + i / 100) for i in range(9)]
    return {
        "heatmap": heatmap([[1, 0], [0, 1]], [name, "y"], "fed", name),
        "heatmap of ten": heatmap([[1] * 10] * 10, [name] * 10, "fed", name),
        "holdings": holdings([name], [[1, 2]], [name, "y"]),
        "byte_bars": byte_bars([(name, "fed", 10.0), (name, "ffc", 9e9)]),
        "bars": bars([Bar(name, {name: 1.0, f"{name} too": 2.0}, "1.23 s  (+12.34 % saved)")], unit="ms", title="t"),
        "intervals": intervals([Interval(name, "1", 3, 0.02, 70_000, "3 ms  onnxruntime fp32")], name),
        "strips": strips([Row(name, "fed", 0.5)]),
        "curves": curves([Line(name, "fed", [0.1] * 200)], [str(number) for number in range(1, 201)], name),
        "scatter": scatter([Mark(name, "fed", 0, 0.5), Mark(name, "ffc", 1e3, 0.5), *many], name),
        "roofline": roofline([Point(name, 1, 1)], 2, 3, name),
    }


@pytest.mark.parametrize("chart", _charts(""))
def test_texts_are_escaped(chart: str) -> None:
    svg = _charts("<script>alert(1)</script>")[chart]
    ElementTree.fromstring(svg)
    assert "<script" not in svg


@pytest.mark.parametrize("chart", _charts(""))
def test_a_chart_stays_in_its_frame_whatever_its_names(chart: str) -> None:
    for name in (
        "a",
        "FFC of a random backbone",
        "Raspberry Pi 4 Model B (4 GB) and a longer name than there is room for",
    ):
        if chart != "roofline" or len(name) < 40:  # its heading is a device's short name
            check_chart(_charts(name)[chart])


def test_names_below_a_long_axis_do_not_overlap() -> None:
    svg = _charts("a")["curves"]
    places = [float(each.get("x", "")) for each in _marks(svg, "text", "t-axis") if (each.text or "").isdigit()]
    assert 3 < len(places) < 20
    assert min(b - a for a, b in pairwise(places)) > 25


def test_a_file_of_its_own_has_the_pages_style_and_a_size() -> None:
    svg = standalone(strips([Row("a", "fed", 0.5)]))
    root = ElementTree.fromstring(svg)
    assert STYLE.read_text(encoding="utf-8") in svg
    left, top, width, height = map(int, root.get("viewBox", "").split())
    assert left < 0 > top
    assert width == WIDTH + 20
    assert int(root.get("width", "")) / int(root.get("height", "")) == pytest.approx(width / height, rel=0.01)


def test_figures_in_words() -> None:
    assert [size(n) for n in (999, 1234, 12_345, 421_834 * 4, 123_456_789)] == [
        "999 B", "1.23 kB", "12.3 kB", "1.69 MB", "123 MB",
    ]  # fmt: skip
    assert [time_text(ms) for ms in (0.0559, 12, 1234, 90_000)] == ["0.0559 ms", "12 ms", "1.23 s", "1.5 min"]
    assert percent(0.1234, 2) == "12.34\u00a0%"
