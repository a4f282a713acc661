"""Tables: read strictly, run once, gone on with after an interruption, and shown beside what was published."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from lab_samples import small_directory

from protofleet.cli import main
from protofleet.contract.errors import MethodError, ProtofleetError, UsageError
from protofleet.hw_profiles.charts.marks import standalone
from protofleet.hw_profiles.charts.scatter import Mark, scatter
from protofleet.lab.paper_tables import runner as bench
from protofleet.lab.paper_tables.config import TABLES, Settings, read_table
from protofleet.lab.paper_tables.pages import write_sheet
from protofleet.lab.paper_tables.run_log import Finished, Ledger, code_mark, run_key
from protofleet.lab.paper_tables.runner import Order, Progress, run_table
from protofleet.lab.paper_tables.table_ledger import sheet_of
from protofleet.lab.reporting.tensorboard import open_board

TABLE = """
title = "A small one"
source = "nobody"
data = "fashion_mnist_subset"
metric = "all/head"
last = 2
seeds = 2
charts = ["curves", "bytes"]
columns = [{ name = "IID" }, { name = "skewed", settings = { partition = "dirichlet", alpha = 0.5 } }]
[settings]
backbone = "fedproto_mnist"
batch = 16
rounds = 2
clients = 3
partition = "iid"
hyper = { lr = 0.05 }
[quick]
says = "one round"
settings = { rounds = 1 }
[[rows]]
name = "FedAvg"
settings = { method = "fedavg", closings = ["ffc"] }
published = { IID = 50.0 }
[[rows]]
name = "FedAvg + FFC"
metric = "all/linear"
settings = { method = "fedavg", closings = ["ffc"] }
[[rows]]
name = "alone"
metric = "own/head"
columns = ["IID"]
family = "nothing"
settings = { method = "local" }
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(TABLE)
    return path


def _quietly(on_round=lambda words, record: None) -> tuple[Progress, list[str]]:
    begun: list[str] = []
    return Progress(lambda done, of, words: begun.append(words) if words else None, on_round, lambda text: None), begun


def _order(table: Path, **given: object) -> Order:
    data = small_directory(table.parent / "data", 20, 5)
    return Order(read_table(str(table))[1], table.parent / "out", str(data), **given)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_names_what_can_run(name: str) -> None:
    _, table = read_table(name)
    for quick, preset in product((False, True), ("", *table.presets)):
        for row, column in table.choose((), ()):
            table.settings_of(row, column, quick=quick, preset=preset).experiment(table.data, 0)
    assert table.fraction.says


def test_the_table_in_the_docs_can_run_and_needs_no_fraction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
    (path := tmp_path / "mine.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    _, table = read_table(str(path))
    for row, column in table.choose((), ()):
        assert table.settings_of(row, column, quick=False).experiment(table.data, 0).method in ("fedproto", "ncm")
    assert main(["lab", "table", str(path), "--quick", "--out", str(tmp_path / "out")]) == 2
    assert "error: --quick, expected a table with a section [quick], got none" in capsys.readouterr().err


def test_an_interrupted_table_goes_on_with_the_next_run(table: Path) -> None:
    order = _order(table, seeds=1, columns=("IID",))
    seen = []

    def stop(words: str, record: object) -> None:
        seen.append(words)
        if words.startswith("alone"):
            raise KeyboardInterrupt

    progress, begun = _quietly(stop)
    with pytest.raises(KeyboardInterrupt):
        run_table(order, progress)
    assert begun == ["FedAvg, IID, seed 0", "alone, IID, seed 0"]  # two rows share the first run
    progress, begun = _quietly()
    cells = run_table(order, progress)
    assert begun == ["alone, IID, seed 0"]
    assert [len(cell.values) for cell in cells] == [1, 1, 1]
    progress, begun = _quietly()
    assert [cell.values for cell in run_table(order, progress)] == [cell.values for cell in cells]
    assert begun == []
    progress, begun = _quietly()
    shown = run_table(replace(order, seeds=2, show=True), progress)
    assert [len(cell.values) for cell in shown] == [1, 1, 1]
    assert begun == []
    assert run_table(replace(order, out=order.out / "other", show=True), progress) == []
    (path,) = (order.out / "rounds").glob("fedavg-iid-seed-0-*.jsonl")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


def test_cells_say_what_the_runs_gave(table: Path) -> None:
    order = _order(table, columns=("IID",), rows=("FedAvg", "FedAvg + FFC"))
    progress, _ = _quietly()
    plain, calibrated = run_table(order, progress)
    assert len(plain.values) == 2
    assert plain.mean == pytest.approx(sum(plain.values) / 2)
    assert plain.difference == pytest.approx(plain.mean - 0.5)
    runs = Ledger(order.out).read()
    one = next(run for run in runs.values() if run.seed == 0)
    assert plain.values[0] == pytest.approx(sum(record["all_classes"]["head"] for record in one.records) / 2)
    assert calibrated.values[0] == one.records[-1]["all_classes"]["linear"]
    assert calibrated.total_bytes - plain.total_bytes == 8 * (50 * 51 // 2 + 10 * 51)
    assert plain.total_bytes == 2 * plain.uplink_bytes
    sheet = sheet_of("small", order, [plain, calibrated], "protofleet lab table small")
    names = {path.name for path in write_sheet(order.out, sheet, order.table)}
    assert names == {"small.json", "small.md", "small-curves.svg", "small-bytes.svg"}
    shown = json.loads((order.out / "small.json").read_text())
    assert [cell["row"] for cell in shown["cells"]] == ["FedAvg", "FedAvg + FFC"]
    assert shown["cells"][0]["published"] == 0.5
    assert f"| FedAvg | IID | {plain.mean * 100:.2f} ±" in (order.out / "small.md").read_text()
    assert sheet.cells[0].seeds == [0, 1]
    assert set(sheet.cells[0].metrics) >= {"worst client", "Jain", "worst class", "calibration error"}
    assert sheet.code == [code_mark()]
    later = replace(order, seeds=1, first_seed=1, show=True)
    assert run_table(later, progress)[0].values == plain.values[1:]
    _check_that_other_code_is_told(order)


def _check_that_other_code_is_told(order: Order) -> None:
    """Runs of other code count where that is asked for, and else are told of."""
    path = Ledger(order.out).path
    path.write_text(path.read_text().replace(code_mark(), "0.1.9 (01234567)"))
    told: list[str] = []
    progress = replace(_quietly()[0], on_line=told.append)
    assert run_table(replace(order, show=True), progress) == []
    assert told == [f"2 runs in {path} are of 0.1.9 (01234567); --any-code counts them"]
    assert len(run_table(replace(order, show=True, any_code=True), progress)) == 2
    assert len(told) == 1


def test_a_diverging_run_is_a_result(table: Path) -> None:
    table.write_text(
        TABLE.replace('"fedavg", closings = ["ffc"] }\npub', '"fedprox", hyper = { lr = 100.0, mu = 100.0 } }\npub')
    )
    order = _order(table, seeds=1, columns=("IID",), rows=("FedAvg",))
    progress, _ = _quietly()
    (cell,) = run_table(order, progress)
    assert cell.mean is None
    assert "training diverged" in cell.failures[0]
    text = write_sheet(order.out, sheet_of("small", order, [cell], "x"), order.table)[1].read_text()
    assert "| FedAvg | IID | diverged |" in text


def test_the_command_end_to_end(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small_directory(table.parent / "data", 20, 5)
    line = [
        "lab",
        "table",
        str(table),
        "--quick",
        "--jobs",
        "1",
        "--data",
        str(data),
        "--columns",
        "IID",
        "--only",
        "FedAvg",
    ]
    assert main([*line, "--out", str(table.parent / "o"), "--json", str(table.parent / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "quick: one round; not comparable" in out
    found = json.loads((table.parent / "r.json").read_text())
    assert found["command"] == "protofleet lab table small.toml --quick --data DIR --only 'FedAvg' --columns 'IID'"
    assert [cell["row"] for cell in found["cells"]] == ["FedAvg"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("rounds = 2", "round = 2"), "unknown field `round`"),
        (('"all/head"', '"every/head"'), "metric, expected part/way, as all/head, got every/head"),
        (("IID = 50.0", "iid = 50.0"), "columns of FedAvg, expected a name of the table, got iid, try one of IID"),
        (
            ('method = "local"', 'method = "locla"'),
            "--method, expected a method of the lab, got locla, try one of local",
        ),
        (("lr = 0.05", "lt = 0.05"), "no hyper-parameter 'lt', try one of lr"),
        (('title = "A small one"', "title = 3"), r"Expected `str`, got `int`"),
    ],
)
def test_wrong_settings_are_one_line_before_anything_runs(table: Path, change: tuple[str, str], line: str) -> None:
    table.write_text(TABLE.replace(*change))
    progress, begun = _quietly()
    with pytest.raises((UsageError, MethodError), match=line):
        run_table(Order(read_table(str(table))[1], table.parent / "out"), progress)
    assert begun == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fedpr-mnis"], "got fedpr-mnis, try one of fedpr-mnist"),
        (["fedpr-mnist", "--only", "FedAgv"], "--only, expected a name of the table, got FedAgv, try one of FedAvg"),
        (["fedpr-mnist", "--columns", "IID"], "--columns, expected a name of the table, got IID"),
        (["fedpr-mnist", "--seeds", "0"], "--seeds, expected 1 or more, got 0"),
        (["fedpr-mnist", "--first-seed", "-1"], "--first-seed, expected 0 or more, got -1"),
        (["fedpr-mnist", "--preset", "cod"], "--preset, expected one of the table's, got cod, try one of printed"),
        (["fedhp-readings", "--preset", "code"], "--preset, expected one of the table's, got code, try without it"),
        (["none.toml"], "lab table none.toml, expected a TOML file, got No such file"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "table", *arguments, "--out", str(tmp_path)]) == 2
    assert line in capsys.readouterr().err


def test_a_torn_line_is_not_read_and_not_glued_to(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(Finished("a", 0, {}, 1.0))
    with ledger.path.open("a") as file:
        file.write('{"key": "b", "se')
    ledger.append(Finished("c", 1, {}, 1.0))
    assert set(ledger.read()) == {"a", "c"}


def test_a_changed_setting_is_another_run() -> None:
    keys = {
        run_key(settings.over(Settings(method="fedavg")).experiment("mnist", 0).resolved(), seed, data)
        for settings in (Settings(rounds=2), Settings(rounds=3), Settings(hyper={"lr": 0.1}))
        for seed in (0, 1)
        for data in ("mnist a:1", "mnist a:2")
    }
    assert len(keys) == 12


def test_layers_override_each_other_and_merge_hyper_parameters() -> None:
    below = Settings(rounds=5, clients=3, hyper={"lr": 0.1, "momentum": 0.5})
    assert Settings(rounds=7, hyper={"lr": 0.2}).over(below) == Settings(
        rounds=7, clients=3, hyper={"lr": 0.2, "momentum": 0.5}
    )


def test_an_unwritable_directory_is_one_line(table: Path) -> None:
    (table.parent / "out").write_text("a file")
    with pytest.raises(ProtofleetError, match="expected a directory to write to"):
        bench.run_table(_order(table), _quietly()[0])


def test_a_scatter_marks_every_method_and_stands_alone() -> None:
    marks = [Mark("FedAvg", "pooled", 1e7, 0.9), Mark("FedProto", "fed", 2e5, 0.85), Mark("local", "local", 0, 0.6)]
    svg = standalone(scatter(marks, "accuracy against bytes"))
    assert svg.count("<circle") == 3
    assert "FedProto: 85.0\u00a0%, 200 kB" in svg
    assert "<style>" in svg


def test_tensorboard_missing_is_one_line_or_writes_events(tmp_path: Path) -> None:
    try:
        import tensorboardX  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(UsageError, match="pip install tensorboardX"):
            open_board(tmp_path)
    else:
        board = open_board(tmp_path)
        board.add_scalar("a", 1.0, 1)
        board.close()
        assert list(tmp_path.glob("events*"))
