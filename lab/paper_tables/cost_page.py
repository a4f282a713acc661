"""`NAME-joules.md` and its charts: what the runs of a table would have cost boards, beside how right they are.

Made by `lab results` from the table's ledger and the devices that ship, for a table whose `charts` name `joules`. Its
data must ship, since how many images a device has is counted there, not kept in the ledger. Rows that have not been run
have a cost and no accuracy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.charts.marks import standalone
from protofleet.hw_profiles.charts.scatter import JOULES, Mark, scatter
from protofleet.hw_profiles.devices.schema import Device as Board
from protofleet.hw_profiles.units import nice_bytes, nice_joules, percent, time_text
from protofleet.lab.board_costs.cost import Spent, boards, errors, run_of
from protofleet.lab.board_costs.work import Work, device_work, network
from protofleet.lab.data.datasets import SHIPPED, Outline, outline
from protofleet.lab.data.partition import hold_back
from protofleet.lab.data.validation import SHARE, hold_back_for_validation
from protofleet.lab.engine.experiment import Experiment
from protofleet.lab.paper_tables.config import Row, Settings, Table
from protofleet.lab.paper_tables.table_ledger import Sheet, SheetCell

__all__ = ["KINDS", "joules_pages", "wants_joules"]

KINDS = {"nothing": "local", "prototypes": "fed", "sums": "ffc", "weights": "pooled"}
_SHOWN = "raspberry-pi-4"  # whose power was measured under load by others, see its file


def wants_joules(sheet: Sheet, table: Table | None) -> bool:
    """Whether this ledger has such a page: a whole run of a table that asks for it, on the table's own data."""
    asked = table is not None and "joules" in table.charts
    return asked and not sheet.quick and not any("--data" in command for command in [*sheet.commands, sheet.command])


def joules_pages(stem: str, sheet: Sheet, table: Table) -> dict[str, str]:
    """The page and its charts, by file name.

    Raises:
        UsageError: the table's data does not ship.
        MethodError: a row's method does not say what its loss consists of.
    """
    if table.data not in SHIPPED:
        raise UsageError(f"{stem}: charts joules", expected="a table whose data ships", got=table.data)
    data, lines = _outline(table.data), [_line(sheet, table, row) for row in table.rows]
    shares = sorted({_share(line.experiment, data) for line in lines})
    divided = sorted({_divided(line.experiment, data) for line in lines})
    works = [_work(line, data) for line in lines]
    able, left_out = boards()
    costs = {board.name: [run_of(work, board) for work in works] for board in able}
    shown = [run for _, run in costs[_SHOWN]]
    columns = [column.name for column in table.columns]
    charts = dict(_charts(lines, shown, columns))
    text = [
        f"# {table.title.partition(':')[0]}: and the joules of its board",
        "",
        *_preface(stem, shares, divided),
        "",
        *_errors(),
        "",
        *_one_board(lines, costs[_SHOWN], columns),
        "",
        *(f"![{name}]({stem}-{name}.svg)" for name in charts),
        "",
        *_every_board("The whole run", lines, {name: [run for _, run in pairs] for name, pairs in costs.items()}),
        "",
        *_every_board("One round", lines, {name: [one for one, _ in pairs] for name, pairs in costs.items()}),
        "",
        *_grounds({name: [run for _, run in pairs] for name, pairs in costs.items()}),
        *_about(able, left_out),
    ]
    return {f"{stem}-joules.md": "\n".join(text) + "\n", **{f"{stem}-{name}.svg": svg for name, svg in charts.items()}}


@dataclass(frozen=True, eq=False)
class _Line:
    """A row, what was run of it, and the run whose cost is asked."""

    row: Row
    cells: tuple[SheetCell | None, ...]
    experiment: Experiment
    way: str

    @property
    def total_bytes(self) -> float | None:
        return next((cell.uplink_bytes_per_client for cell in self.cells if cell is not None), None)

    def accuracy(self, column: int) -> float | None:
        cell = self.cells[column]
        return None if cell is None else cell.accuracy


def _line(sheet: Sheet, table: Table, row: Row) -> _Line:
    cells = tuple(sheet.cell(row.name, column.name) for column in table.columns)
    run = next((cell for cell in cells if cell is not None), None)
    first = table.columns[0]
    settings = table.settings_of(row, first, quick=False) if run is None else msgspec.convert(run.settings, Settings)
    metric = table.metric_of(row, first) if run is None else run.metric
    return _Line(row, cells, settings.experiment(table.data, 0), metric.rpartition("/")[2])


@lru_cache(maxsize=2)
def _outline(name: str) -> Outline:
    return outline(name)


def _work(line: _Line, data: Outline) -> Work:
    net = network(line.experiment.backbone, data.input_shape, data.classes)
    return device_work(line.experiment, line.way, net, _share(line.experiment, data))


def _divided(experiment: Experiment, data: Outline) -> int:
    """How many images clients divide: what is scored for validation, and what `only` leaves out, is nobody's."""
    scored = SHARE if experiment.validation and experiment.test_samples != 0 else 0.0
    return experiment.partition.only or data.samples - round(scored * data.samples)


def _share(experiment: Experiment, data: Outline) -> int:
    """How many of them a device trains on: the even share, without its own test."""
    cut = hold_back_for_validation if experiment.validation else hold_back
    own = np.arange(_divided(experiment, data) // experiment.partition.clients)
    return len(cut(own, experiment.local_test, 0)[0])


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _preface(stem: str, shares: Sequence[int], divided: Sequence[int]) -> list[str]:
    several, total = (" or ".join(f"{count:,}" for count in numbers) for numbers in (shares, divided))
    return [
        "**Modelled, not measured**: seconds and joules of one device that does what a client of "
        f"[{stem}]({stem}.md) did, on every board whose profile ships.",
        "",
        f"The device has {several} images, its even share of {total}. Counted are its training steps, passes"
        " over its images and sums, by the models of `protofleet profile` on a CPU (fp32, all cores) and of `protofleet"
        " cost` on an array. Not counted are reading images, noise, encoding, sending, waiting, and the server; no"
        " profile has a radio's power. This page is made by `protofleet lab results` from the ledger and"
        " `hw_profiles/devices`.",
    ]


def _errors() -> list[str]:
    measured = errors()
    training, inference = measured["training"], measured["inference"]

    def off(kind: dict[str, float]) -> str:
        return (
            f"by {percent(kind['ours_median'], 0)} in the median, nine of ten by up to {percent(kind['ours_p90'], 0)}"
        )

    return [
        "How far off: on networks that it had not seen, the latency model missed"
        f" {training['rows']:.0f} training steps of ONNX Runtime, all on one x86 machine, {off(training)}, and"
        f" {inference['rows']:.0f} of its inferences {off(inference)}; of its 80 % intervals of those steps"
        f" {percent(training['inside_80'], 0)} held. No board's training step has been measured, nor its power"
        " by us. A range is that interval times the range of the board's power. Between methods on one board the"
        " differences are surer than the figures: what the model misjudges there, it misjudges in all of them.",
    ]


def _one_board(lines: Sequence[_Line], costs: Sequence[tuple[Spent, Spent]], columns: Sequence[str]) -> list[str]:
    heads = [
        *columns,
        "bytes",
        "a round",
        "",
        "the run",
        "",
        "range",
        "ground",
        "µJ/byte",
        *(f"best, {name}" for name in columns),
    ]
    best_texts = [_best(lines, [run for _, run in costs], column) for column in range(len(columns))]
    output = [
        f"## {_SHOWN}",
        "",
        "Accuracy in percent, then what one device sends and spends. µJ/byte: what a radio may take for a byte before"
        " sending costs as much as computing. Best: no other row is as accurate for fewer bytes, or fewer joules.",
        "",
        f"|  | {' | '.join(heads)} |",
        "| --- |" + " ---: |" * (len(heads) - len(columns)) + " --- |" * len(columns),
    ]
    for place, (line, (one, run)) in enumerate(zip(lines, costs, strict=True)):
        accuracies = [_percent(line.accuracy(column)) for column in range(len(columns))]
        sent, joules = line.total_bytes, run.joules
        assert joules is not None
        assert one.joules is not None
        texts = [*accuracies, "not run" if sent is None else nice_bytes(sent) if sent else "none"]
        texts += [nice_joules(one.joules.value), time_text(one.seconds.value * 1e3)]
        texts += [nice_joules(joules.value), time_text(run.seconds.value * 1e3), _range(run), run.support]
        texts.append(f"{joules.value / sent * 1e6:,.0f}" if sent else "")
        texts += [column[place] for column in best_texts]
        output.append(f"| {line.row.name} | {' | '.join(texts)} |")
    return output


def _best(lines: Sequence[_Line], runs: Sequence[Spent], column: int) -> list[str]:
    """For each row what nobody beats it in: of those that are as accurate, none sends less, none spends less."""
    right = [line.accuracy(column) for line in lines]
    sent = [line.total_bytes for line in lines]
    joules = [None if run.joules is None else run.joules.value for run in runs]
    by_bytes, by_joules = _front(right, sent), _front(right, joules)
    return [
        " and ".join(name for name, is_best in (("bytes", b), ("joules", j)) if is_best)
        for b, j in zip(by_bytes, by_joules, strict=True)
    ]


def _front(right: Sequence[float | None], cost: Sequence[float | None]) -> list[bool]:
    def beaten(place: int) -> bool:
        own, paid = right[place], cost[place]
        if own is None or paid is None:
            return True
        others = [(r, c) for r, c in zip(right, cost, strict=True) if r is not None and c is not None]
        return any(r >= own and c <= paid and (r, c) != (own, paid) for r, c in others)

    return [not beaten(place) for place in range(len(right))]


def _every_board(title: str, lines: Sequence[_Line], costs: dict[str, list[Spent]]) -> list[str]:
    output = [f"## {title}, on every board", "", f"|  | {' | '.join(costs)} |", "| --- |" + " ---: |" * len(costs)]
    for place, line in enumerate(lines):
        texts = [_spent(spent[place]) for spent in costs.values()]
        output.append(f"| {line.row.name} | {' | '.join(texts)} |")
    output.append(f"| *ground* | {' | '.join(map(_support, costs.values()))} |")
    return output


def _support(costs: Sequence[Spent]) -> str:
    """The support of a board's figures: one word where all have the same, else how many have each."""
    counted = Counter(cost.support for cost in costs)
    return next(iter(counted)) if len(counted) == 1 else ", ".join(f"{name} {n}" for name, n in counted.items())


def _grounds(costs: dict[str, list[Spent]]) -> list[str]:
    """What the figures of each board lack."""
    lines = [
        "Ground: a figure is *interpolated* where rows of this runtime on this board are of networks like it,"
        " *extrapolated* beyond one of these, and has *no ground* where nothing like it was left out and predicted;"
        " then no range is given ([decision 270](../docs/decisions/270-what-a-prediction-rests-on.md)). On an array it"
        " is *simulated*.",
        "",
    ]
    for board, spent in costs.items():
        reasons = dict.fromkeys(reason for cost in spent for reason in cost.reasons)
        if reasons:
            lines.append(f"- {board}: {_support(spent)}: {'; '.join(reasons)}.")
    return [*lines, ""]


def _spent(cost: Spent) -> str:
    joules = "" if cost.joules is None else f"{nice_joules(cost.joules.value)}, "
    return joules + time_text(cost.seconds.value * 1e3)


def _about(able: Sequence[Board], left_out: Sequence[Board]) -> list[str]:
    lines = ["Boards, and the power that is taken while they compute:", ""]
    for board in able:
        power = board.power
        watts = (
            "no power in its file, so no joules"
            if power is None
            else f"{power.active_low_w:g} to {power.active_high_w:g} W"
        )
        lines.append(f"- {board.name}: {board.title}; {watts}.")
    lines += [f"- {board.name}: left out, its file has no CPU, on which our client trains." for board in left_out]
    return lines


def _charts(lines: Sequence[_Line], runs: Sequence[Spent], columns: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place, column in enumerate(columns):
        suffix = f"-{place + 1}" if len(columns) > 1 else ""
        marks = [
            Mark(line.row.name, KINDS.get(line.row.family, "pooled"), run.joules.value, right)
            for line, run in zip(lines, runs, strict=True)
            if run.joules is not None and (right := line.accuracy(place)) is not None
        ]
        if marks:
            title = f"accuracy against joules of one device, {_SHOWN}, {column}"
            yield f"joules{suffix}", standalone(scatter(marks, title, JOULES))


def _range(cost: Spent) -> str:
    """Its joules' bounds; none where nothing stands for them."""
    if cost.joules is None or not cost.bounded:
        return "–"
    return f"{nice_joules(cost.joules.low)} – {nice_joules(cost.joules.high)}"


def _percent(fraction: float | None) -> str:
    return "not run" if fraction is None else f"{fraction * 100:.2f}"
