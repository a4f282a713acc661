"""Tables on narrow and on old terminals: no number is ever lost, and no character ends a command."""

from __future__ import annotations

import io
import json
import re

import pytest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from protofleet.contract.console.tables import show_table
from protofleet.contract.printable import keep_printable

NUMBER = re.compile(r"(?<![0-9a-z])\d[\d.,]*(?![0-9a-z])")  # no piece of a hash, which may be wrapped


def drawn(width, headings, rows, **options):
    out = io.StringIO()
    show_table(Console(file=out, width=width), headings, rows, **options)
    return out.getvalue()


_cells = st.text("0123456789.,–% MBms", min_size=0, max_size=12).map(str.strip)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), columns=st.integers(1, 12), width=st.integers(30, 140))
def test_every_cell_is_whole_in_one_line_at_any_width(data, columns, width):
    rows = data.draw(st.lists(st.lists(_cells, min_size=columns, max_size=columns), min_size=1, max_size=4))
    rows = [[f"row {number}", *cells] for number, cells in enumerate(rows)]
    lines = drawn(width, [f"head{number}" for number in range(columns + 1)], rows).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    for cell in (cell for row in rows for cell in row if cell):
        assert any(cell in line for line in lines), cell
    assert not any("…" in line for line in lines)


def test_where_it_fits_it_is_a_table_and_where_not_each_row_is_a_block():
    headings, rows = ("device", "latency", "memory"), [("pi", "1.5ms", "120 MB"), ("host", "", "80 MB")]
    assert len(drawn(40, headings, rows, title="all").splitlines()) == 5
    blocks = drawn(18, headings, rows).splitlines()
    assert blocks == ["pi", "  latency 1.5ms", "  memory 120 MB", "host", "  memory 80 MB"]


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", "0.5-1.2 é ..."), ("ascii", "0.5-1.2 e ..."), ("utf-8", "0.5–1.2 é …")]
)
def test_what_an_encoding_lacks_is_written_as_the_nearest_it_has(encoding, shown):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    keep_printable(stream, object())
    stream.write("0.5–1.2 é …")
    assert raw.getvalue().decode(encoding) == shown
    stream.write("☃")
    assert raw.getvalue()[len(shown.encode(encoding)) :] == ("☃".encode() if encoding == "utf-8" else b"\\u2603")


COMMANDS = (
    ("profile", "BUNDLE"),
    ("profile", "--list"),
    ("cost", "BUNDLE"),
    ("inspect", "BUNDLE"),
)


def told(command, bundle, columns, encoding="utf-8"):
    """What it prints on a terminal of so many columns and of this encoding."""
    words = [bundle if word == "BUNDLE" else word for word in command]
    done = run(*words, encoding=encoding, COLUMNS=str(columns))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_that_draw_tables_survive_a_latin_1_terminal_of_60_columns(command, mnist_like_bundle):
    """Every number of the wide output is in the narrow one, whole."""
    bundle = mnist_like_bundle()
    wide = told(command, bundle, 400)
    narrow = told(command, bundle, 60, "latin-1")
    assert "\x1b" not in narrow
    for line in narrow.splitlines():
        assert "..." not in line or "sha256" in wide, line
    missing = {n for n in NUMBER.findall(wide) if n not in narrow.replace("\n", " ")}
    assert not missing


def test_ascii_alone_is_enough(mnist_like_bundle):
    assert "raspberry-pi-4" in told(("profile", "BUNDLE"), mnist_like_bundle(), 80, "ascii")


def test_at_80_columns_a_fleet_and_a_method_table_have_every_figure_of_the_report(mnist_like_bundle, tmp_path):
    bundle, out = mnist_like_bundle(), tmp_path / "r.json"
    from protofleet.hw_profiles.units import size, time_text

    text = told(("profile", "BUNDLE", "--json", out), bundle, 80)
    for device in json.loads(out.read_text())["devices"]:
        at = text.index(device["name"])
        assert time_text(device["inference"][0]["latency_ms"]).replace(" ", "") in text[at : at + 400]
        assert size(device["memory"]["peak_bytes_at_most"]) in text[at : at + 400]
    text = told(("cost", "BUNDLE", "--json", out), bundle, 80)
    for row in json.loads(out.read_text())["methods"]:
        for figure in (time_text(row["step_ms"]), size(row["memory"]["peak_bytes"])):
            assert figure in text
        assert f"{row['saved_percent']['memory']:.2f} %" in text
