"""Pages of ledgers: made again without a run, with a verdict on each published number."""

from __future__ import annotations

from pathlib import Path
from shutil import copy

import msgspec
import pytest
from commands import ROOT, run

from protofleet.cli import main
from protofleet.contract.errors import StoreError, UsageError
from protofleet.hw_profiles.charts.curves import Line, curves
from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.lab.board_costs.cost import run_of
from protofleet.lab.board_costs.work import device_work, network
from protofleet.lab.paper_tables import run_log
from protofleet.lab.paper_tables.config import TABLES, Column, Missing, Preset, Quick, Row, Settings, Table, read_table
from protofleet.lab.paper_tables.pages import differing, made, take, write
from protofleet.lab.paper_tables.run_log import Finished, Ledger, code_mark
from protofleet.lab.paper_tables.table_ledger import (
    UNNAMED,
    Sheet,
    SheetCell,
    is_ledger,
    merged,
    read_sheet,
    write_json,
)
from protofleet.lab.paper_tables.verdicts import claims_of, command_for

RESULTS = Path(__file__).parents[3] / "results"
LEDGERS = [path for path in sorted(RESULTS.glob("*.json")) if is_ledger(path)]

TABLE = Table(
    title="t",
    source="s",
    data="fashion_mnist_subset",
    metric="all/head",
    settings=Settings(method="fedavg", clients=3),
    columns=(Column(name="IID"),),
    rows=(
        Row(name="near", published={"IID": 50.5}),
        Row(name="wide", published={"IID": 55.0}, spread={"IID": 6.0}),
        Row(name="far", published={"IID": 60.0}, why="a guess", tested="fedhp-lead"),
        Row(name="gain", gains={"IID": 10.0}, over="base", sent={"IID": 100.0}),
        Row(name="base"),
        Row(name="changed", published={"IID": 50.0}, settings=Settings(hyper={"lr": 0.2})),
        Row(name="not there", published={"IID": 50.0}, needs="weights"),
    ),
    missing=(Missing(name="no row", published={"IID": 1.0}, why="not built"),),
    seeds=5,
    hours=0.5,
    preset="printed",
    presets={
        "printed": Preset(says="as printed"),
        "code": Preset(says="code", settings=Settings(batch=8), rows={"far": Settings(hyper={"lr": 0.5})}),
    },
)


def _cell(row: str, accuracy: float, **given: object) -> SheetCell:
    found = {each.name: each for each in TABLE.rows}[row]
    settings = TABLE.settings_of(found, TABLE.columns[0], quick=False)
    fields: dict[str, object] = {
        "row": row,
        "column": "IID",
        "metric": "all/head",
        "accuracy": accuracy,
        "published": None,
        "difference": None,
        "values": [accuracy - 0.001, accuracy + 0.001, accuracy - 0.001, accuracy + 0.001] if accuracy else [0.0] * 4,
        "std_over_seeds": None,
        "std_over_clients": None,
        "seconds": 3600.0,
        "uplink_bytes_per_client_round": 400.0,
        "uplink_bytes_per_client": 400.0,
        "curve": {"1": accuracy},
        "failures": [],
        "settings": msgspec.to_builtins(settings),
        "resolved": settings.experiment(TABLE.data, 0).resolved(),
    }
    return SheetCell(**fields | given)


def _cell_of(
    table: Table,
    row: str,
    column: Column,
    accuracy: float | None,
    *,
    quick: bool = False,
    preset: str = "",
    **given: object,
) -> SheetCell:
    """What a row of a real table would have given."""
    found = {each.name: each for each in table.rows}[row]
    settled = table.settings_of(found, column, quick=quick, preset=preset)
    facts = {"column": column.name, "metric": table.metric_of(found, column)}
    cell = _cell("near", 0.5, **facts, resolved=settled.experiment(table.data, 0).resolved(), **given)
    return msgspec.structs.replace(cell, row=row, accuracy=accuracy)


def _sheet(*cells: SheetCell, table: str = "t") -> Sheet:
    return Sheet(schema="protofleet.table/2", table=table, title="t", source="s", notes=[], cells=list(cells))


def test_pages_are_what_their_ledgers_make() -> None:
    assert differing(RESULTS) == [], "run protofleet lab results"


def test_a_closing_costs_a_device_a_pass_and_the_sums() -> None:
    """Here, where the page above has exported the network's graphs already."""
    _, table = read_table("accuracy-bytes")
    net, works = network("fedproto_mnist", (28, 28, 1), 10), {}
    for row in table.rows:
        experiment = table.settings_of(row, table.columns[0], quick=False).experiment(table.data, 0)
        works[row.name] = device_work(experiment, table.metric_of(row, table.columns[0]).rpartition("/")[2], net, 600)
    plain, closed, frozen = works["FedAvg"], works["FedAvg + FFC"], works["FFC of a random backbone"]
    assert [(part.name, part.times) for part in plain.round] == [
        ("training", 38)
    ]  # of 16 of 600 images, the last short
    assert plain.round[0].workload is closed.round[0].workload
    assert (plain.closing, plain.rounds) == ((), 30)
    assert [part.name for part in closed.closing] == [part.name for part in frozen.round] == ["features", "statistic"]
    assert frozen.rounds == 1
    passes = {name: sum(part.times for part in work.round if part.name == "features") for name, work in works.items()}
    assert passes["FedHKD*"] == 2 * passes["FedProto"] == 2 * passes["NCM of a random backbone"] > passes["FedAvg"] == 0
    board, runs = load_devices()["raspberry-pi-4"], {}
    for name, work in works.items():
        runs[name] = run_of(work, board)[1].seconds.value
    assert runs["FFC of a random backbone"] < runs["FedAvg"] < runs["FedAvg + FFC"] < runs["FedProto"] < runs["FedHKD*"]
    assert runs["FedAvg"] < runs["SCAFFOLD"] < runs["FedProx"] * 1.01  # corrections cost what they touch


@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.stem)
def test_a_ledger_has_the_rows_and_the_published_numbers_of_its_table(path: Path) -> None:
    sheet = read_sheet(path)
    _, table = read_table(sheet.table)
    rows = {row.name: row for row in table.rows}
    for cell in sheet.cells:
        found = rows[cell.row].published.get(cell.column)
        assert cell.published == pytest.approx(None if found is None else found / 100)
        assert cell.command


def test_an_early_ledger_says_that_it_does_not_name_its_code() -> None:
    early = [path for path in LEDGERS if b'"protofleet.table/1"' in path.read_bytes()]
    for path in early:
        assert read_sheet(path).code == [UNNAMED]
        assert UNNAMED in path.with_suffix(".md").read_text()


def test_verdicts_follow_from_the_rows() -> None:
    stale = _cell("changed", 0.4, resolved=_cell("base", 0.4).resolved)
    cells = [_cell("near", 0.5), _cell("wide", 0.5), _cell("far", 0.5), _cell("gain", 0.55), _cell("base", 0.5), stale]
    found = {(claim.row, claim.what): claim for claim in claims_of(TABLE, _sheet(*cells))}
    verdicts = {key: claim.verdict for key, claim in found.items()}
    assert verdicts == {
        ("near", "accuracy"): "within 1 point",
        ("wide", "accuracy"): "within the paper's spread",
        ("far", "accuracy"): "not reproduced",
        ("gain", "gain over base"): "inside our interval",
        ("gain", "parameters sent"): "within a tenth",
        ("changed", "accuracy"): "not run",
        ("not there", "accuracy"): "not run",
        ("no row", "accuracy"): "not run",
    }
    assert found["far", "accuracy"].why == "a guess; the table fedhp-lead tests why"
    assert found["gain", "gain over base"].difference == pytest.approx(0.0)
    assert found["changed", "accuracy"].why == "with earlier settings, lr 0.01 for 0.2, it gave 40.00"
    assert found["not there", "accuracy"].why == "needs weights"
    assert found["not there", "accuracy"].hours == pytest.approx(5.0)  # an hour for each of five seeds, as the others
    assert {claim.hours for claim in claims_of(TABLE, None) if claim.row_there} == {2.5}
    assert {claim.verdict for claim in claims_of(TABLE, _sheet(_cell("far", 0.6)), "code")} == {"not run"}
    before = {name: value for name, value in cells[2].resolved.items() if name != "scaling"}  # a later setting
    (far,) = (c for c in claims_of(TABLE, _sheet(_cell("far", 0.5, resolved=before))) if c.row == "far")
    assert far.verdict == "not reproduced"


@pytest.mark.parametrize(
    ("published", "values", "verdict"),
    [
        (50.0, [0.5], "one seed"),  # equal, and no verdict
        (55.0, [0.48, 0.54], "inside our interval"),  # of two seeds: ±38 points
        (50.9, [0.4999, 0.5, 0.5001], "within 1 point"),
        (98.2, [0.9899, 0.99, 0.9901], "not reproduced"),  # 0.8 points are nearly half of the error
        (98.92, [0.9899, 0.99, 0.9901], "within 1 point"),
        (51.2, [0.4999, 0.5, 0.5001], "not reproduced"),
    ],
)
def test_a_verdict_weighs_seeds_and_the_error(published: float, values: list[float], verdict: str) -> None:
    row = msgspec.structs.replace(TABLE.rows[0], published={"IID": published}, spread={})
    table = msgspec.structs.replace(TABLE, rows=(row, *TABLE.rows[1:]))
    cell = _cell("near", sum(values) / len(values), values=values)
    (claim,) = (each for each in claims_of(table, _sheet(cell)) if each.row == "near")
    assert claim.verdict == verdict
    assert (claim.half is None) == (len(values) == 1)


def test_a_preset_lies_over_the_rows_and_the_default_changes_nothing() -> None:
    row, column = TABLE.rows[2], TABLE.columns[0]
    plain = TABLE.settings_of(row, column, quick=False)
    assert TABLE.settings_of(row, column, quick=False, preset="printed") == plain
    code = TABLE.settings_of(row, column, quick=False, preset="code")
    assert (code.batch, code.hyper) == (8, {"lr": 0.5})
    with pytest.raises(UsageError, match="--preset, expected one of the table's, got framework, try one of"):
        TABLE.settings_of(row, column, quick=False, preset="framework")
    assert command_for("t", ["a", "a", "b"], ["IID"], "code") == (
        "protofleet lab table t --preset code --only 'a,b' --columns 'IID'"
    )


@pytest.mark.parametrize("name", TABLES)
def test_each_table_with_presets_says_which_one_it_is(name: str) -> None:
    _, table = read_table(name)
    assert (table.preset in table.presets) or not table.presets
    assert set(table.presets) <= {"printed", "code", "framework"}


def test_the_command_writes_what_differs_and_check_fails_until_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in LEDGERS[1:2]:
        copy(path, tmp_path)
    assert main(["lab", "results", str(tmp_path), "--check"]) == 2
    assert "error: --check, expected pages as their ledgers make them, got" in capsys.readouterr().err
    assert main(["lab", "results", str(tmp_path)]) == 0
    assert main(["lab", "results", str(tmp_path), "--check"]) == 0
    page = tmp_path / f"{LEDGERS[1].stem}.md"
    text = page.read_bytes()
    page.write_bytes(b"\xff" + text)
    assert (differing(tmp_path), write(tmp_path), page.read_bytes()) == ([page.name], [page], text)
    page.unlink()
    (page / "below").mkdir(parents=True)
    assert differing(tmp_path) == [page.name]
    assert main(["lab", "results", str(tmp_path)]) == 2
    assert f"error: lab results {page}, expected a file that can be written, got Is a dir" in capsys.readouterr().err
    (page / "below").rmdir()
    page.rmdir()
    write(tmp_path)
    page.write_text(page.read_text().replace("seeds", "sees"))
    assert differing(tmp_path) == [page.name]
    assert write(tmp_path) == [page]
    (tmp_path / "mine.md").write_text("What I think of it.")
    assert differing(tmp_path) == []
    (tmp_path / "gone.md").write_text(page.read_text())
    (tmp_path / "gone-curves.svg").write_text("")
    assert differing(tmp_path) == ["gone.md", "gone-curves.svg"]
    assert main(["lab", "results", str(tmp_path), "--check", "--take", str(LEDGERS[1])]) == 2
    assert "--take with --check, expected one of them" in capsys.readouterr().err
    assert main(["lab", "results", str(tmp_path / "none")]) == 1
    assert "expected a folder of ledgers, got none" in capsys.readouterr().err


def test_newer_cells_take_the_place_of_older_ones(tmp_path: Path) -> None:
    before = _sheet(_cell("near", 0.5), _cell("far", 0.5))
    newer = _sheet(_cell("far", 0.6), _cell("base", 0.7))
    assert {cell.row: cell.accuracy for cell in merged(before, newer).cells} == {"near": 0.5, "far": 0.6, "base": 0.7}
    with pytest.raises(UsageError, match="expected a run of t, whole, got t by the settings 'code', whole"):
        merged(before, msgspec.structs.replace(newer, preset="code"))
    with pytest.raises(UsageError, match="expected a run of t, whole, got other, whole"):
        merged(before, _sheet(table="other"))
    write_json(tmp_path / "out.json", newer)
    (folder := tmp_path / "results").mkdir()
    assert [read_sheet(path) for path in take(folder, tmp_path / "out.json")] == [newer]
    quick = msgspec.structs.replace(newer, quick="a round")
    write_json(tmp_path / "quick.json", quick)
    with pytest.raises(UsageError, match=r"--take, expected a name that ends with -quick.json for a quick run"):
        take(folder, tmp_path / "quick.json")
    write_json(tmp_path / "out-quick.json", quick)
    assert [read_sheet(path) for path in take(folder, tmp_path / "out-quick.json")] == [quick]
    write_json(tmp_path / "out-quick.json", msgspec.structs.replace(newer, quick="two rounds"))
    with pytest.raises(UsageError, match=r"expected a run of t, quick \(a round\), got t, quick \(two rounds\)"):
        take(folder, tmp_path / "out-quick.json")


def test_a_ledger_is_of_the_table_the_preset_and_the_fraction_that_its_name_says(tmp_path: Path) -> None:
    """Or none of the folder's files is changed, and none of its numbers taken for not run."""
    (folder := tmp_path / "results").mkdir()
    sheet = _sheet(table="fedhp-mnist")
    for name, given in {
        "fedpr-mnist.json": {},
        "fedhp-mnist.json": {"preset": "framework"},
        "fedhp-mnist-quick.json": {"preset": "framework", "quick": "a round"},
    }.items():
        write_json(tmp_path / name, msgspec.structs.replace(sheet, **{"preset": "printed"} | given))
        with pytest.raises(UsageError, match=r"--take, expected the name fedhp-mnist\S*.json for what"):
            take(folder, tmp_path / name)
        copy(tmp_path / name, folder)
        with pytest.raises(UsageError, match=r"lab results, expected the name fedhp-mnist\S*.json for what"):
            write(folder)
        assert [path.name for path in folder.iterdir()] == [name]
        (folder / name).unlink()
    for quick, name in (("a round", "fedhp-mnist.json"), (None, "fedhp-mnist-quick.json")):
        write_json(folder / name, msgspec.structs.replace(sheet, preset="printed", quick=quick))
        with pytest.raises(UsageError, match=f"lab results, expected a name that ends with .*got {folder / name}"):
            differing(folder)
        (folder / name).unlink()
    for stem in ("fedhp-mnist", "fedhp-mnist-framework", "fedhp-mnist-framework-quick"):
        given = {
            "preset": "framework" if "framework" in stem else "printed",
            "quick": "a" if stem.endswith("quick") else None,
        }
        write_json(tmp_path / f"{stem}.json", msgspec.structs.replace(sheet, **given))
        assert take(folder, tmp_path / f"{stem}.json") == [folder / f"{stem}.json"]


def test_a_number_that_has_not_been_run_comes_with_what_its_quick_fraction_gave() -> None:
    table = msgspec.structs.replace(TABLE, quick=Quick(says="a round", settings=Settings(rounds=1)))

    def of_quick(row: str, accuracy: float, rounds: int = 1) -> SheetCell:
        resolved = table.settings_of({each.name: each for each in table.rows}[row], table.columns[0], quick=True)
        resolved = msgspec.structs.replace(resolved, rounds=rounds).experiment(table.data, 0).resolved()
        return _cell(row, accuracy, resolved=resolved)

    cells = [of_quick("near", 0.3), of_quick("gain", 0.33), of_quick("base", 0.3), of_quick("wide", 0.2, rounds=2)]
    quick = msgspec.structs.replace(_sheet(*cells), quick="a round")
    found = {(each.row, each.what): each for each in claims_of(table, _sheet(_cell("near", 0.5)), "", quick)}
    assert found["near", "accuracy"].quick is None, "it has been run"
    assert found["gain", "gain over base"].quick == pytest.approx(10.0)
    assert found["gain", "gain over base"].verdict == "not run"
    assert found["wide", "accuracy"].quick is None, "of another fraction than the table has now"
    assert found["far", "accuracy"].quick is None
    (near,) = (each for each in claims_of(table, None, "", quick) if each.row == "near")
    assert (near.verdict, near.ours, near.quick) == ("not run", None, pytest.approx(30.0))


def test_a_quick_fraction_that_gave_nothing_is_told_from_one_that_was_not_run(tmp_path: Path) -> None:
    table = read_table("fedproto-mnist-pu")[1]
    gave: dict[str, tuple[float | None, list[str]]] = {
        "FedProto": (None, ["diverged | in round 3\n"]),
        "FedProto pu 0.5": (0.0, []),
        "FedAvg": (0.5, []),
    }
    cells = [
        _cell_of(table, row, table.columns[0], accuracy, quick=True, failures=failures)
        for row, (accuracy, failures) in gave.items()
    ]
    sheet = msgspec.structs.replace(
        _sheet(*cells, table="fedproto-mnist-pu"), preset=table.preset, quick=table.quick.says
    )
    write_json(tmp_path / "fedproto-mnist-pu-quick.json", sheet)
    lines = made(tmp_path)["README.md"].splitlines()
    of = [line for line in lines if "fedproto-mnist-pu" in line and f"| {table.columns[0].name} |" in line]
    ends = {line.split(" | ")[0].removeprefix("| "): line.rpartition("10 rounds")[2] for line in of}
    assert ends["FedProto"] == r", came to nothing: diverged \| in round 3 |"
    assert ends["FedProto pu 0.5"] == ", gave 0.00 |"
    assert ends["FedAvg"] == ", gave 50.00 |"
    assert ends["FedAvg pu 1"] == " |"


def test_a_cell_without_an_accuracy_sends_no_parameters() -> None:
    """What diverged is no run of which it can be said what it sends."""
    failed = msgspec.structs.replace(
        _cell("gain", 0.5, failures=["diverged"], uplink_bytes_per_client_round=0.0), accuracy=None
    )
    found = {each.what: each for each in claims_of(TABLE, _sheet(failed, _cell("base", 0.5)))}
    for claim in (found["parameters sent"], found["gain over base"]):
        assert (claim.verdict, claim.ours, claim.why) == ("not reproduced", None, "diverged")
    nothing = {each.what: each for each in claims_of(TABLE, _sheet(_cell("gain", 0.5), _cell("base", 0.0)))}
    assert nothing["gain over base"].ours is None, "over nothing at all"


def test_a_number_that_other_settings_give_too_is_counted_once(tmp_path: Path) -> None:
    table = read_table("fedhp-mnist")[1]
    before = made(tmp_path)["README.md"].splitlines()
    for preset, accuracy in (("printed", 0.5), ("framework", 0.85)):
        cell = _cell_of(table, "FedProto", table.columns[1], accuracy, preset=preset)
        sheet = msgspec.structs.replace(_sheet(cell, table="fedhp-mnist"), preset=preset)
        write_json(tmp_path / f"fedhp-mnist{'-framework' if preset == 'framework' else ''}.json", sheet)
    after = made(tmp_path)["README.md"].splitlines()
    total = int(before[2].split()[0].removeprefix("**"))
    assert before[2] == f"**{total} published numbers: {total} not run.**"
    assert total == sum(len(claims_of(read_table(name)[1], None)) for name in TABLES) - 9  # FedHP's second reading
    assert after[2] == f"**{total} published numbers: {total - 1} not run, 1 not reproduced.**"
    assert after[3] == "Some also by other settings of the same tables (`--preset`): 1 within 1 point."
    start = next(n for n, line in enumerate(after) if line.startswith("## [fedhp-mnist-framework]"))
    rows_there = [line for line in after[start:] if line.startswith("| ")]
    assert rows_there[2].startswith(
        "| FedProto | Dir(0.3) | accuracy | 85.58 ± 1.25 | 85.00 ± 0.18 | -0.58 | 4 | within 1 point"
    )
    assert not rows_there[3].startswith("| FedHP | Dir(0.3)"), "what they have not been run for is not said twice"


def test_of_several_ledgers_all_are_taken_or_none(tmp_path: Path) -> None:
    (folder := tmp_path / "results").mkdir()
    write_json(folder / "one.json", _sheet(_cell("near", 0.5), _cell("far", 0.5)))
    before = (folder / "one.json").read_bytes()
    (tmp_path / "again").mkdir()
    write_json(tmp_path / "one.json", _sheet(_cell("far", 0.6)))
    write_json(tmp_path / "again" / "one.json", _sheet(_cell("base", 0.7)))
    (tmp_path / "two.json").write_text("{")
    given = [tmp_path / "one.json", tmp_path / "again" / "one.json", tmp_path / "two.json"]
    with pytest.raises(UsageError, match=r"two\.json, expected a table's ledger"):
        take(folder, *given)
    assert (folder / "one.json").read_bytes() == before
    write_json(tmp_path / "two.json", _sheet(_cell("near", 0.4)))
    assert take(folder, *given) == [folder / "one.json", folder / "two.json"]
    assert {cell.row: cell.accuracy for cell in read_sheet(folder / "one.json").cells} == {
        "near": 0.5,
        "far": 0.6,
        "base": 0.7,
    }


def test_a_quick_number_is_of_the_preset_the_fraction_and_the_row_below_that_the_table_has_now() -> None:
    quick = Quick(says="a round", settings=Settings(rounds=1))
    table = msgspec.structs.replace(TABLE, quick=quick)
    rows = {each.name: each for each in table.rows}

    def resolved(row: str, preset: str = "", **given: object) -> dict[str, object]:
        settings = table.settings_of(rows[row], table.columns[0], quick=True, preset=preset)
        return msgspec.structs.replace(settings, **given).experiment(table.data, 0).resolved()

    def gave(*cells: SheetCell, of: Table = table, preset: str = "") -> dict[tuple[str, str], float | None]:
        return {(each.row, each.what): each.quick for each in claims_of(of, None, preset, _sheet(*cells))}

    gain, base = ("gain", "gain over base"), _cell("base", 0.3, resolved=resolved("base"))
    over = _cell("gain", 0.33, resolved=resolved("gain"))
    assert gave(over, base)[gain] == pytest.approx(10.0)
    assert gave(over)[gain] is None
    assert gave(over, _cell("base", 0.3, resolved=resolved("base", rounds=2)))[gain] is None, "over another run"
    assert gave(over, base, of=TABLE)[gain] is None, "the table has no fraction any more"
    assert gave(_cell("gain", 0.33, resolved=resolved("gain", trainer="torch")), base)[gain] == pytest.approx(10.0)
    mine = _cell("far", 0.3, resolved=resolved("far", "code"))
    assert gave(mine, preset="code")["far", "accuracy"] == pytest.approx(30.0)
    assert gave(mine)["far", "accuracy"] is None


def test_a_whole_gain_is_of_the_settings_of_both_rows() -> None:
    stale = msgspec.structs.replace(TABLE.settings, rounds=7).experiment(TABLE.data, 0).resolved()
    cells = [_cell("gain", 0.55), _cell("base", 0.5, resolved=stale)]
    (found,) = (each for each in claims_of(TABLE, _sheet(*cells)) if each.what == "gain over base")
    assert (found.verdict, found.why) == ("not run", "with earlier settings, course.rounds 7 for 5, it gave +10.00 %")


def test_the_list_says_what_a_fraction_gave_beside_what_was_not_run(tmp_path: Path) -> None:
    _, table = read_table("fedhkd-cifar10")
    (row,) = (each for each in table.rows if each.name == "FedHKD")
    column = next(each for each in table.columns if each.name in row.gains)
    cells = [_cell_of(table, name, column, gave, quick=True) for name, gave in ((row.name, 0.33), (row.over, 0.3))]
    sheet = msgspec.structs.replace(_sheet(*cells, table="fedhkd-cifar10"), preset=table.preset, quick="a few")
    write_json(tmp_path / "fedhkd-cifar10-quick.json", sheet)
    files = made(tmp_path)
    assert files["README.md"].count(", gave +10.00 %") == 1
    assert "**quick: a few; not comparable with the published numbers**" in files["fedhkd-cifar10-quick.md"]
    assert "with earlier settings" not in files["README.md"], "a fraction is no run of the table"
    (tmp_path / "fedhkd-cifar10-quick.json").unlink()
    for name, other in (("own-quick", {"table": "own"}), ("fedhkd-cifar10-code-quick", {"preset": "code"})):
        write_json(tmp_path / f"{name}.json", msgspec.structs.replace(sheet, **other))
    write_json(tmp_path / "fedhkd-cifar10.json", msgspec.structs.replace(sheet, cells=[], quick=None))
    assert ", gave" not in made(tmp_path)["README.md"], "of another table, and by other settings"


def test_no_ledger_is_one_line(tmp_path: Path) -> None:
    (path := tmp_path / "a.json").write_text('{"schema": "protofleet.table/9"}')
    with pytest.raises(UsageError, match="expected a table's ledger"):
        read_sheet(path)
    with pytest.raises(StoreError, match="expected a table's ledger, got No such file"):
        read_sheet(tmp_path / "none.json")
    for content in ("", '{"schema": "protofleet.table/2",', '<<<<<<< {"schema": "protofleet.table/2"}'):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"a.json, expected a table's ledger, got "):
            write(tmp_path)
    path.write_text('{"schema": "protofleet.lab/1"}\n{"schema": "protofleet.lab/1"}\n')  # `lab run --json`'s
    assert not is_ledger(path)
    assert not is_ledger(tmp_path)
    (hardware := tmp_path / "hardware-training-cost.json").write_text('{"claims": [{}]}')
    with pytest.raises(UsageError, match="expected the ledger of hardware cost, got Object missing"):
        write(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.json", hardware.name]
    write_json(path, msgspec.structs.replace(_sheet(), schema="protofleet.table/9"))
    with pytest.raises(UsageError, match=r"got protofleet.table/9, try a newer Protofleet"):
        read_sheet(path)


def test_runs_of_other_code_count_only_where_that_is_asked_for(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(Finished("a", 0, {}, 1.0))
    ledger.append(Finished("b", 0, {}, 1.0, code=code_mark()))
    assert set(ledger.read(code_mark())) == {"b"}
    assert set(ledger.read()) == {"a", "b"}


def test_the_mark_of_the_code_follows_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_mark()
    assert before.endswith(")")
    monkeypatch.setattr(run_log, "_CODE", ("contract",))
    code_mark.cache_clear()
    assert code_mark() != before
    code_mark.cache_clear()


def test_resolved_settings_have_every_default() -> None:
    found = Settings(method="fedavg").experiment("mnist", 0).resolved()
    assert found["hyper"]["momentum"] == 0.5
    assert found["scaling"] == "normalised"
    assert found["course"]["fraction"] == 1.0
    assert "seed" not in found["course"]
    assert found == Settings(method="fedavg", batch=32, hyper={"lr": 0.01}).experiment("fashion", 7).resolved()


def test_a_band_lies_around_its_line() -> None:
    svg = curves([Line("a", "fed", [0.5, 0.95], band=[0.1, 0.1])], ["1", "2"], "t")
    assert svg.count("<polygon") == 1
    assert "<polygon" not in curves([Line("a", "fed", [0.5, 0.95])], ["1", "2"], "t")


def test_without_a_name_the_tables_are_listed() -> None:
    done = run("lab", "table")
    assert done.returncode == 0
    words = [line.split() for line in done.stdout.splitlines()]
    assert [each[0] for each in words] == list(TABLES)
    assert {each[0]: each[1] for each in words}["accuracy-bytes"] == "offline"
    assert {each[0]: each[1] for each in words}["fedhp-mnist"] == "needs"
    assert all(each[-1] == f"[{read_table(each[0])[1].data}]" for each in words)
    assert "--data FOLDER" in done.stderr


def test_every_ledger_names_its_data() -> None:
    ledgers = [read_sheet(path) for path in sorted((ROOT / "results").glob("*.json")) if is_ledger(path)]
    assert len(ledgers) > 10
    assert all(sheet.data for sheet in ledgers)
    assert {sheet.data for sheet in ledgers if sheet.table in TABLES} <= {read_table(name)[1].data for name in TABLES}
