"""Quick fractions lie within the bands that their tables state: of the tables whose data ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofleet.lab.data.datasets import SHIPPED
from protofleet.lab.paper_tables.config import TABLES, read_table
from protofleet.lab.paper_tables.runner import Order, Progress, run_table

BANDED = [(name, table) for name in TABLES if (table := read_table(name)[1]).quick and table.quick.bands]


@pytest.mark.parametrize(("name", "table"), BANDED, ids=[name for name, _ in BANDED])
def test_a_band_is_of_data_that_ships_and_has_room(name: str, table) -> None:
    assert table.data in SHIPPED
    assert all(2 <= high - low <= 12 for low, high in table.quick.bands.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "table"), BANDED, ids=[name for name, _ in BANDED])
def test_the_quick_fraction_lies_within_its_bands(name: str, table, tmp_path: Path) -> None:
    rows = tuple(table.quick.bands)
    order = Order(table, tmp_path, quick=True, rows=rows, columns=(table.columns[0].name,))
    silent = Progress(lambda done, of, words: None, lambda words, record: None, lambda text: None)
    for cell in run_table(order, silent):
        low, high = table.quick.bands[cell.row.name]
        assert low <= cell.mean * 100 <= high, f"{name}, {cell.row.name}: {cell.mean * 100:.2f}"
