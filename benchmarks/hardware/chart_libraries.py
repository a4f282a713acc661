"""What a charting library makes of three of our charts: weight of the page, static SVG, hover (decision 090).

    python -m benchmarks.hardware.chart_libraries ours|altair|plotly|bokeh|pygal|matplotlib SUMMARY PROFILE OUT

SUMMARY is a demo's `summary.json`, PROFILE what `protofleet profile --json` wrote. Curves over rounds, a confusion
matrix and the phases of a training step go into one page that must work without a network, `OUT/LIBRARY.html`. No
library is a dependency: install the one that is asked for into an environment of its own.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

_HEAD = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
_FLUID = "<style>svg { max-width: 100%; height: auto }</style>"
_WAYS = {"local_only": "local only", "federated": "federated"}


class Figures:
    """The three charts' numbers."""

    def __init__(self, summary: dict[str, Any], profile: dict[str, Any]) -> None:
        self.labels: list[str] = summary["labels"]
        self.counts: list[list[int]] = summary["confusion"]["federated"]
        self.shares = [[count / max(sum(row), 1) for count in row] for row in self.counts]
        self.curves = {name: [one["all_classes"][key] for one in summary["curves"]] for key, name in _WAYS.items()}
        self.rounds = [str(number + 1) for number in range(len(summary["curves"]))]
        steps = {d["title"].split(",")[0]: d["training_step"] for d in profile["devices"] if d["training_step"]}
        self.devices = list(steps)
        self.phases = {
            phase: [100 * step["phases_ms"].get(phase, 0) / step["latency_ms"] for step in steps.values()]
            for phase in ("forward", "input_gradient", "weight_gradient", "update")
        }


def ours(figures: Figures) -> str:
    """This project's charts and their style."""
    from protofleet.hw_profiles.charts.bars import Bar, bars
    from protofleet.hw_profiles.charts.curves import Line, curves
    from protofleet.hw_profiles.charts.grids import heatmap
    from protofleet.hw_profiles.charts.marks import STYLE

    kinds = dict(zip(figures.curves, ("local", "fed"), strict=True))
    lines = [Line(name, kinds[name], values) for name, values in figures.curves.items()]
    steps = [
        Bar(device, {phase: values[row] for phase, values in figures.phases.items()})
        for row, device in enumerate(figures.devices)
    ]
    charts = curves(lines, figures.rounds, "accuracy"), heatmap(figures.counts, figures.labels, "fed", "confusion")
    return f"<style>{STYLE.read_text()}</style>" + "".join(charts) + bars(steps, unit="% of the step")


def altair(figures: Figures) -> str:
    """Static SVG by vl-convert; `to_html(inline=True)` is its page with hover."""
    import altair as alt
    import vl_convert

    def data(names: tuple[str, str, str], rows: list[tuple[Any, ...]]) -> Any:
        return alt.Chart(alt.Data(values=[dict(zip(names, row, strict=True)) for row in rows]))

    lines = [(w, r, v) for w, values in figures.curves.items() for r, v in zip(figures.rounds, values, strict=True)]
    cells = [
        (figures.labels[r], figures.labels[c], v) for r, row in enumerate(figures.shares) for c, v in enumerate(row)
    ]
    parts = [(d, p, values[i]) for p, values in figures.phases.items() for i, d in enumerate(figures.devices)]
    charts = [
        data(("way", "round", "share"), lines).mark_line().encode(x="round:O", y="share:Q", color="way:N"),
        data(("is", "as", "share"), cells).mark_rect().encode(x="as:N", y="is:N", color="share:Q"),
        data(("device", "phase", "share"), parts).mark_bar().encode(x="share:Q", y="device:N", color="phase:N"),
    ]
    print(f"altair with hover: {len(alt.vconcat(*charts).to_html(inline=True).encode()):,} bytes")
    return "".join(vl_convert.vegalite_to_svg(chart.to_dict()) for chart in charts)


def plotly(figures: Figures) -> str:
    """Drawn by its script, which the page carries."""
    import plotly.graph_objects as go

    charts = (
        go.Figure([go.Scatter(x=figures.rounds, y=values, name=name) for name, values in figures.curves.items()]),
        go.Figure(go.Heatmap(z=figures.shares, x=figures.labels, y=figures.labels)),
        go.Figure([go.Bar(orientation="h", y=figures.devices, x=v, name=p) for p, v in figures.phases.items()]),
    )
    return "".join(chart.to_html(full_html=False, include_plotlyjs=not i) for i, chart in enumerate(charts))


def bokeh(figures: Figures) -> str:
    """Drawn by its script, which the page carries."""
    from bokeh.embed import file_html
    from bokeh.layouts import column
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    lines = figure(width=360, height=300, x_range=figures.rounds, tooltips="$name: @y")
    for name, values in figures.curves.items():
        lines.line(figures.rounds, values, name=name)
    size = range(len(figures.labels))
    grid = figure(width=360, height=360, x_range=figures.labels, y_range=figures.labels)
    cells = [(figures.labels[c], figures.labels[r], figures.shares[r][c]) for r in size for c in size]
    grid.rect([x for x, _, _ in cells], [y for _, y, _ in cells], 1, 1, fill_alpha=[v for _, _, v in cells])
    steps = figure(width=360, height=360, y_range=figures.devices)
    steps.hbar_stack(list(figures.phases), y="device", source={"device": figures.devices, **figures.phases})
    return file_html(column(lines, grid, steps), INLINE)


def pygal(figures: Figures) -> str:
    """Static SVG; it has no matrix. Without `js=[]` each chart loads a script from a host for its hover."""
    from pygal import Config, HorizontalStackedBar, Line

    print("pygal loads by itself:", *Config().js)
    lines, steps = Line(js=[], width=440, height=300), HorizontalStackedBar(js=[], width=440, height=400)
    lines.x_labels, steps.x_labels = figures.rounds, figures.devices
    for chart, series in ((lines, figures.curves), (steps, figures.phases)):
        for name, values in series.items():
            chart.add(name, values)
    return "".join(re.sub(r"<\?xml.*?\?>", "", chart.render(is_unicode=True)) for chart in (lines, steps))


def matplotlib(figures: Figures) -> str:
    """Static SVG with letters as letters."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    whole, (lines, grid, steps) = plt.subplots(3, figsize=(4.6, 12), layout="constrained")
    for name, values in figures.curves.items():
        lines.plot(figures.rounds, values, label=name)
    grid.pcolormesh(figures.labels, figures.labels, figures.shares)
    left = [0.0] * len(figures.devices)
    for values in figures.phases.values():
        steps.barh(figures.devices, values, left=left)
        left = [a + b for a, b in zip(left, values, strict=True)]
    whole.savefig(written := io.StringIO(), format="svg")
    return re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>", "", written.getvalue(), flags=re.DOTALL)


def main() -> int:
    """Draw, store, and say what the page weighs."""
    library, summary, profile, out = sys.argv[1:]
    draw = {f.__name__: f for f in (ours, altair, plotly, bokeh, pygal, matplotlib)}[library]
    page = Path(out) / f"{library}.html"
    drawn = draw(Figures(json.loads(Path(summary).read_text()), json.loads(Path(profile).read_text())))
    page.write_text(_HEAD + _FLUID + drawn, encoding="utf-8")
    tips, named = drawn.count("<title>"), len(re.findall(r'aria-label="[^"]+: [^"]+"', drawn))
    print(f"{library}: {page.stat().st_size:,} bytes, {drawn.count('<svg')} <svg>, {tips} <title>, {named} aria-label")
    return 0


if __name__ == "__main__":
    sys.exit(main())
