"""One self-contained HTML page from plain values: headings, figures, tables, bar charts. No script, nothing fetched.

A page is a list of sections, each a heading and blocks of HTML made by the functions here. Text given to them is
escaped; a number is formatted by the caller, who knows its unit. Colours come from one palette that survives being
printed and is told apart by people who see colours differently (Okabe and Ito).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["PALETTE", "Bar", "bars", "details", "facts", "heat", "notes", "page", "section", "table", "tag"]

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
_STYLE = """
:root{--ink:#1b2733;--soft:#5b6b7a;--line:#dde4ea;--back:#fff;--panel:#f6f8fa;--accent:#0072b2}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:18px;margin:40px 0 10px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:22px 0 6px}
p{margin:6px 0 10px;max-width:80ch}
.lead{color:var(--soft)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px;margin:16px 0}
.fact{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.fact b{display:block;font-size:20px;font-weight:650;font-variant-numeric:tabular-nums;white-space:nowrap}
.fact span{color:var(--soft);font-size:12.5px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 9px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600;border-bottom:2px solid var(--line);vertical-align:bottom}
th:first-child,td:first-child,.l{text-align:left}
.tight{font-size:11.5px}
.tight th,.tight td{padding:4px 5px}
.tight th{white-space:normal}
td.w{white-space:normal;text-align:left;min-width:22ch}
.tight td.w{min-width:14ch}
tr:hover td{background:#f3f7fb}
.tag{display:inline-block;font-size:11px;padding:0 7px;border-radius:9px;border:1px solid
var(--line);color:var(--soft);background:#fff;vertical-align:1px}
.measured{color:#00684b;border-color:#7fc9ae}
.simulated{color:#00538a;border-color:#8fbfe0}
.predicted{color:#8a5a00;border-color:#e6c37a}
ul.notes{margin:6px 0;padding-left:18px;color:var(--soft);font-size:13.5px}
ul.notes li{margin:3px 0;max-width:95ch}
details>summary{cursor:pointer;color:var(--accent);font-weight:600;margin:8px 0}
svg{max-width:100%;height:auto;display:block;margin:8px 0}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg .soft{fill:var(--soft)}
footer{color:var(--soft);font-size:12.5px;margin-top:48px}
@media print{main{max-width:none;padding:0}h2{break-after:avoid}details{display:block}}
"""


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its parts by series name, and what is written at its end."""

    label: str
    parts: Mapping[str, float]
    note: str = ""


def page(title: str, lead: str, sections: Sequence[str], footer: str = "") -> str:
    """The whole document. `sections` come from `section`."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f'<p class="lead">{escape(lead)}</p>{"".join(sections)}<footer>{escape(footer)}</footer></main></body></html>\n'
    )


def section(heading: str, *blocks: str, lead: str = "") -> str:
    """A heading, a sentence below it, and blocks of HTML."""
    first = f"<p>{escape(lead)}</p>" if lead else ""
    return f"<section><h2>{escape(heading)}</h2>{first}{''.join(blocks)}</section>"


def details(summary: str, *blocks: str) -> str:
    """Blocks that open on a click."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(blocks)}</details>"


def facts(values: Sequence[tuple[str, str]]) -> str:
    """Large figures with a caption each: (figure, caption)."""
    boxes = (
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(caption)}</span></div>' for value, caption in values
    )
    return f'<div class="facts">{"".join(boxes)}</div>'


def notes(lines: Sequence[str]) -> str:
    """A list of small print."""
    return f'<ul class="notes">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def tag(kind: str) -> str:
    """Where a figure comes from: measured, simulated or predicted."""
    return f'<span class="tag {escape(kind)}">{escape(kind)}</span>'


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    wide: Sequence[int] = (),
    left: Sequence[int] = (0,),
    shade: Sequence[Sequence[str]] | None = None,
    tight: bool = False,
) -> str:
    """A table. `wide` columns hold sentences, `left` ones names; `shade` gives each cell's background, or ''.

    `tight` is for many columns: they must fit a sheet of paper.
    """
    head = "".join(f'<th class="{"l" if i in (*left, *wide) else ""}">{escape(h)}</th>' for i, h in enumerate(headers))
    body = []
    for r, row in enumerate(rows):
        cells = []
        for c, value in enumerate(row):
            kind = "w" if c in wide else "l" if c in left else ""
            back = f' style="background:{shade[r][c]}"' if shade and shade[r][c] else ""
            text = value if isinstance(value, str) and value.startswith('<span class="tag') else escape(str(value))
            cells.append(f'<td class="{kind}"{back}>{text}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    dress = ' class="tight"' if tight else ""
    return (
        f'<div class="scroll"><table{dress}><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def heat(value: float, worst: float) -> str:
    """A background between white (0) and a clear orange (`worst`)."""
    share = 0.0 if worst <= 0 else min(1.0, max(0.0, value / worst)) ** 0.6
    mix = [round(255 + (c - 255) * share) for c in (240, 170, 80)]
    return f"rgb({mix[0]},{mix[1]},{mix[2]})" if share > 0.03 else ""


def bars(values: Sequence[Bar], *, unit: str, title: str = "", width: int = 1040) -> str:
    """Horizontal stacked bars on one scale, with a legend of the series and the total or note at each bar's end."""
    series = list(dict.fromkeys(name for bar in values for name in bar.parts))
    most = max((sum(bar.parts.values()) for bar in values), default=0.0) or 1.0
    left, right, step, top = 215, 190, 26, 34
    scale = (width - left - right) / most
    out = [f'<text x="0" y="14" class="soft">{escape(title)} ({escape(unit)})</text>']
    x = float(left)
    for index, name in enumerate(series) if len(series) > 1 else ():
        out.append(f'<rect x="{x:.0f}" y="5" width="11" height="11" rx="2" fill="{PALETTE[index % len(PALETTE)]}"/>')
        out.append(f'<text x="{x + 16:.0f}" y="15" class="soft">{escape(name)}</text>')
        x += 30 + 7.0 * len(name)
    for row, bar in enumerate(values):
        y, x = top + row * step, float(left)
        out.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(bar.label)}</text>')
        for index, name in enumerate(series):
            size = bar.parts.get(name, 0.0) * scale
            if size > 0:
                hint = f"<title>{escape(f'{bar.label}, {name}: {bar.parts[name]:,.4g} {unit}')}</title>"
                colour = PALETTE[index % len(PALETTE)]
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="18" fill="{colour}">{hint}</rect>')
                x += size
        total = sum(bar.parts.values())
        out.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{escape(bar.note or f"{total:,.4g}")}</text>')
    height = top + len(values) * step + 6
    label = escape(title or "bar chart")
    frame = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {frame} role="img" aria-label="{label}">{"".join(out)}</svg>'
