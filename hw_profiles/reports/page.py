"""One way to make a report's page: plain values and a jinja2 template that extends `base.html.j2`, in one HTML file.

1. A report is plain JSON values.
2. Python code beside the template makes a view of it. In a view every figure is already text, and every chart is SVG.
3. The template makes one page, which loads nothing else.

`parts.html.j2` has the common parts of the templates: tags, tiles, tables, notes. All content of a view is escaped,
except charts, which escape their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.hw_profiles.charts.marks import STYLE
from protofleet.hw_profiles.units import nice_bytes, percent, seconds_text, thousands

__all__ = ["Table", "check_pages", "render_page", "shade"]

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A table's figures in words.

    Attributes:
        name: what a screen reader calls it.
        left: columns of names, `wide` of sentences, `tags` of where a figure comes from.
        shades: how dark each cell is, from 0 to 1; none where every cell is plain.
        tight: for many columns.
    """

    name: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    wide: Sequence[int] = ()
    tags: Sequence[int] = ()
    shades: Sequence[Sequence[float]] = ()
    tight: bool = False


def check_pages(extra: str = "report") -> None:
    """Check before any long work that pages can be made.

    Args:
        extra: what to install where they cannot.

    Raises:
        UsageError: jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(
            "a report's page",
            expected="the jinja2 package",
            got="none installed",
            hint=install_command(extra),
        ) from None


def render_page(template: Path, view: Mapping[str, Any], *, charts: Mapping[str, str | Sequence[str]]) -> str:
    """The whole document.

    Args:
        template: a file that extends `base.html.j2`.
        view: plain values; the template fails on a name that is not in it.
        charts: by name, one SVG or a list of them; the template has them as `charts`.

    Raises:
        UsageError: jinja2 is not installed.
    """
    check_pages()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE, STYLE.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(nice_bytes=nice_bytes, percent=percent, seconds=seconds_text, thousands=thousands)
    drawn = {
        name: Markup(chart) if isinstance(chart, str) else [Markup(one) for one in chart]
        for name, chart in charts.items()
    }
    return environment.get_template(template.name).render(**view, charts=drawn)


def shade(value: float, worst: float) -> float:
    """How dark a cell is: 0 for next to nothing, 1 for the worst."""
    share = 0.0 if worst <= 0 else min(1.0, max(0.0, value / worst)) ** 0.6
    return share if share > 0.03 else 0.0
