"""A report's page: one template system, escaped, dark and light, and one line where no page can be made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from page_checks import check_page

from protofleet.cli import main
from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.hw_profiles.reports.page import Table, check_pages, render_page, shade

ROOT = Path(__file__).parents[3]
TEMPLATE = """{% extends "base.html.j2" %}{% import "parts.html.j2" as parts %}
{% block title %}{{ name }}{% endblock %}
{% block content %}<h1>{{ name }}</h1>{{ parts.tiles([(name, name)]) }}{{ parts.table(table) }}
{{ parts.notes([name]) }}{% call parts.fold(name) %}{{ charts.one }}{% endcall %}
{% for chart in charts.more %}{{ chart }}{% endfor %}{% endblock %}
"""


def _page(folder: Path, name: str, **given: object) -> str:
    (folder / "t.html.j2").write_text(TEMPLATE)
    table = Table(name, (name, "b", "c"), [(name, "measured", name)], tags=(1,), wide=(2,), **given)
    return render_page(
        folder / "t.html.j2", {"name": name, "table": table}, charts={"one": "<svg/>", "more": ["<svg/>"]}
    )


def test_all_but_charts_is_escaped(tmp_path: Path) -> None:
    page = _page(tmp_path, '<b onclick=x>&"')
    assert "<b onclick" not in page
    assert page.count("<svg/>") == 2
    check_page(page.replace("<svg/>", ""))


def test_a_cell_is_as_dark_as_its_share(tmp_path: Path) -> None:
    page = _page(tmp_path, "n", shades=[(0.0, 0.0, 1.0)])
    assert page.count("style=") == 1
    assert '<td data-head="c" class="w" style="--dark:1.00">' in page
    assert '<span class="tag measured">measured</span>' in page
    assert [shade(value, 10.0) for value in (0.0, 0.001, 10.0, 20.0)] == [0.0, 0.0, 1.0, 1.0]
    assert shade(1.0, 0.0) == 0.0


def test_a_name_that_the_view_lacks_is_no_blank(tmp_path: Path) -> None:
    (tmp_path / "t.html.j2").write_text("{{ nothing }}")
    with pytest.raises(Exception, match="'nothing' is undefined"):
        render_page(tmp_path / "t.html.j2", {}, charts={})


@pytest.mark.parametrize("command", ["cost", "profile", "demo"])
def test_without_jinja2_a_page_is_refused_in_one_line_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    html, out = tmp_path / "r.html", tmp_path / "out"
    args = {
        "cost": ["spherefed_convnet", "--html", str(html), "--json", str(tmp_path / "r.json")],
        "profile": ["missing.bundle", "--html", str(html), "--json", str(tmp_path / "r.json")],
        "demo": ["--out", str(out)],
    }
    assert main([command, *args[command]]) == 2
    told, hint = (
        "expected the jinja2 package, got none installed",
        f"try {install_command({'demo': 'demo'}.get(command, 'report'))}",
    )
    assert capsys.readouterr().err == f"error: a report's page, {told}, {hint}\n"
    assert list(tmp_path.iterdir()) == []
    for refused in (check_pages, lambda: _page(tmp_path, "n")):
        with pytest.raises(UsageError, match="jinja2"):
            refused()


def test_without_jinja2_a_report_without_a_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["cost", "spherefed_convnet", "--batch", "1", "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["command"] == "cost"


def test_templates_and_styles_are_installed_with_the_code() -> None:
    """Each kind of file that a page is made of is package data (and each folder of them a package)."""
    import tomllib

    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    rooms = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("benchmarks", "tests")]
    made_of = [path.relative_to(ROOT) for room in rooms for ending in ("*.j2", "*.css") for path in room.rglob(ending)]
    assert {path.suffix for path in made_of} == {".j2", ".css"}
    for path in made_of:
        assert f"*{path.suffix}" in told
        assert (ROOT / path.parent / "__init__.py").is_file()


def test_the_page_in_results_is_readable_on_a_phone() -> None:
    check_page((ROOT / "results" / "hardware-training-cost.html").read_text(encoding="utf-8"))
