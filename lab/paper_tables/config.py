"""The tables' settings: `lab/paper_tables/definitions/NAME.toml`, or a user's own file, read strictly into frozen
values.

A table is rows × columns. A run's settings are those of the table, overridden by the column's, then by the row's, and
with `--quick` by those of `[quick]`; `hyper` is merged name by name. A row and a column that end in the same settings
share one run, and may read different metrics from it: FedAvg, and FedAvg with FFC.

    metric = "all/head"       part/way; parts: all, own, local, trained, fresh, personal (lab/engine/evaluation.py)
    last   = 10               the mean over the measured rounds among the last 10
    preset = "printed"        which of `[presets]` the settings are as they stand; the others change some of them

What is published of a row: `published`, accuracies, with `spread`, their ±; `gains` over another row, `over`; `sent`,
parameters that a client sends in a round.

A key that is no setting is refused with its place in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.files.atomic_files import read_toml
from protofleet.contract.methods import closing_method
from protofleet.contract.names import known
from protofleet.export.backbones.backbone_names import check_backbone_name
from protofleet.lab.data.partition import PARTITIONS, Partition
from protofleet.lab.method_names import check_method_name

if TYPE_CHECKING:
    from protofleet.lab.engine.experiment import Experiment

__all__ = ["PARTS", "TABLES", "Column", "Missing", "Preset", "Row", "Settings", "Table", "read_table"]

_FOLDER = Path(__file__).parent / "definitions"
_WITH_NUMBER = {  # option of `lab run` that a partition takes its first number by
    "dirichlet": "--alpha",
    "quantity": "--alpha",
    "uneven": "--alpha",
    "pathological": "--classes-per-client",
    "shots": "--ways",
}
_OPTIONS = {  # of `lab run`, by the names of settings
    "only": "--samples",
    **{name: f"--{name.replace('_', '-')}" for name in ("partition", "clients", "alpha", "classes_per_client")},
    **{name: f"--{name.replace('_', '-')}" for name in ("ways", "ways_spread", "shots")},
}
TABLES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
PARTS = {
    "all": "all_classes",
    "own": "own_classes",
    "local": "local_test",
    "trained": "trained",
    "fresh": "fresh",
    "personal": "personal",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a run is: any of `protofleet lab run`'s options; None leaves it to the next layer."""

    method: str | None = None
    backbone: str | None = None
    batch: int | None = None
    rounds: int | None = None
    fraction: float | None = None
    evaluate_every: int | None = None
    evaluate_last: int | None = None
    backbones: tuple[str, ...] | None = None
    head: str | None = None
    scaling: str | None = None
    trainer: str | None = None
    keep_optimizer: bool | None = None
    validation: bool | None = None
    shift: str | None = None
    severity: int | None = None
    liars: int | None = None
    rule: str | None = None
    test_samples: int | None = None
    positive_rate: float | None = None
    local_test: float | None = None
    fresh: bool | None = None
    weights: str | None = None
    closings: tuple[str, ...] | None = None
    personal: tuple[str, ...] | None = None
    partition: str | None = None
    clients: int | None = None
    alpha: float | None = None
    classes_per_client: int | None = None
    min_samples: int | None = None
    ways: int | None = None
    ways_spread: int | None = None
    shots: int | None = None
    only: int | None = None
    min_classes: int | None = None
    min_client_samples: int | None = None
    hyper: dict[str, int | float | str] = {}

    def over(self, below: Settings) -> Settings:
        """These settings, and `below` where they say nothing."""
        mine = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(below, **mine | {"hyper": below.hyper | self.hyper})

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def division(self) -> Partition:
        """How the data are divided.

        Raises:
            UsageError: by no scheme that is known, or by numbers that are none of it.
        """
        given = self._given()
        numbers = {name: given[name] for name in Partition.__dataclass_fields__ if name in given}
        return Partition(given.get("partition", "iid"), **numbers)

    def check_names(self, place: str = "") -> None:
        """That method, backbones and partition are such; torch is not loaded for it, nor are data.

        Args:
            place: of these settings in a file; empty for options.

        Raises:
            UsageError, MethodError: a name is none.
        """
        check_method_name(self.method or "", f"{place}: method" if place else "--method")
        for name in self.backbones or ([self.backbone] if self.backbone is not None else []):
            check_backbone_name(name, f"{place}: backbone" if place else "--backbone")
        try:
            self.division  # noqa: B018
        except UsageError as error:
            message = f"{place}: {error.message}" if place else _OPTIONS.get(error.message, error.message)
            hint = error.hint if place else _by_options(self.partition or "") or error.hint
            raise UsageError(message, expected=error.expected, got=error.got, hint=hint) from None

    def experiment(self, data: str, seed: int) -> Experiment:
        """The experiment that these settings describe.

        Raises:
            UsageError, MethodError: when they do not fit together.
        """
        from protofleet.lab.engine.deployed import Course
        from protofleet.lab.engine.experiment import Experiment
        from protofleet.lab.engine.run_averaging import Measures

        given = self._given()

        def some(*names: str) -> dict[str, Any]:
            return {name: given[name] for name in names if name in given}

        if given.get("method") == closing_method().name:
            given["rounds"] = 1  # sums over a fixed extractor are the same in every round
        given |= {"weights": Path(given["weights"])} if given.get("weights") not in (None, "pretrained") else {}
        return Experiment(
            method=given.get("method", ""),
            data=data,
            partition=self.division,
            course=Course(
                calibrate="ffc" in given.get("closings", ()),
                seed=seed,
                **some("rounds", "fraction", "evaluate_every", "rule"),
            ),
            measures=Measures(**some("closings", "personal", "evaluate_last", "fresh")),
            **some("backbone", "backbones", "head", "scaling", "batch", "test_samples", "positive_rate", "local_test"),
            **some("hyper", "weights", "shift", "severity", "validation", "trainer", "keep_optimizer", "liars"),
        )


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One condition that every row is run under; with `part`, of the same runs another part of what was measured."""

    name: str
    settings: Settings = Settings()
    part: str | None = None


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One method.

    Attributes:
        published: percent, by column's name.
        metric: instead of the table's.
        spread: the paper's own ±, points of a percent, by column's name.
        gains: published gain over the accuracy of the row `over`, in percent of it, by column's name.
        sent: parameters that one client sends in a round, as published, by column's name.
        why: what is known of a number that is not reproduced.
        tested: the table that tests the cause, by name.
        needs: what must be at hand before this row can be run: weights, a network that is not here.
        family: what goes up: `nothing`, `prototypes`, `sums` or `weights`; a chart's colour.
        columns: the only columns that this row is run in; all when empty.
        reading_of: another row of the table, whose published numbers this one gives by another reading of the paper.
        own_hyper: whether the row's hyper-parameters replace the table's and the column's instead of joining them.
    """

    name: str
    settings: Settings = Settings()
    published: dict[str, float] = {}
    spread: dict[str, float] = {}
    gains: dict[str, float] = {}
    over: str = ""
    sent: dict[str, float] = {}
    why: str = ""
    tested: str = ""
    needs: str = ""
    metric: str | None = None
    family: str = "weights"
    columns: tuple[str, ...] = ()
    reading_of: str = ""
    own_hyper: bool = False
    note: str = ""


class Quick(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `--quick` changes, and a line that says so.

    Attributes:
        bands: where a row's accuracy must lie in the first column that it is in, percent from and to, on any processor.
    """

    says: str
    seeds: int = 1
    settings: Settings = Settings()
    bands: dict[str, tuple[float, float]] = {}


class Missing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is published and no row gives: `published` in percent by column's name, and why."""

    name: str
    published: dict[str, float]
    why: str


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings by another source: as printed, of the public code, of the authors' framework.

    Attributes:
        says: what they are, and what they change.
        settings: over the table's and the columns', under the rows'.
        rows: over a row's own, by its name.
    """

    says: str
    settings: Settings = Settings()
    rows: dict[str, Settings] = {}


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published table and how it is regenerated.

    Attributes:
        data: a name of the Hub, when no `--data` is given.
        metric: part/way.
        last: a cell is the mean over the measured rounds among the last so many.
        seeds: runs for each cell, seeds 0, 1, ….
        charts: of `curves`, `bytes`.
        notes: what differs from the paper; of a table that tests causes, its hypotheses, as they stood before the runs.
        found: what became of the hypotheses, a line for each.
        preset: which of `presets` the table is as it stands; it changes nothing.
        hours: of one run on one core, guessed, where no run of the table has been timed.
        needs: as a row's, of every row.
        against: the row that all others are compared with, seed by seed.
        missing: published numbers without a row.
        target: an accuracy in percent; how many rounds and bytes it takes is told.
    """

    title: str
    source: str
    data: str
    metric: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    quick: Quick | None = None
    settings: Settings = Settings()
    last: int = 1
    seeds: int = 1
    charts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    preset: str = ""
    presets: dict[str, Preset] = {}
    hours: float | None = None
    needs: str = ""
    against: str = ""
    target: float | None = None
    missing: tuple[Missing, ...] = ()

    def metric_of(self, row: Row, column: Column) -> str:
        """The row's own metric, or the table's, of the column's part."""
        metric = row.metric or self.metric
        return metric if column.part is None else f"{column.part}/{metric.partition('/')[2]}"

    @property
    def fraction(self) -> Quick:
        """What `--quick` runs.

        Raises:
            UsageError: the table states none.
        """
        if self.quick is None:
            raise UsageError(
                "--quick", expected="a table with a section [quick]", got="none", hint="--seeds 1, or --only"
            )
        return self.quick

    def settings_of(self, row: Row, column: Column, *, quick: bool, preset: str = "") -> Settings:
        """A cell's settings, by a preset's name or as they stand.

        Raises:
            UsageError: the table has no such preset.
        """
        chosen = self._preset(preset)
        own = chosen.rows.get(row.name, Settings()).over(row.settings)
        settled = own.over(chosen.settings.over(column.settings.over(self.settings)))
        settled = self.fraction.settings.over(settled) if quick else settled
        return msgspec.structs.replace(settled, hyper=own.hyper) if row.own_hyper else settled

    def _preset(self, name: str) -> Preset:
        if not name:
            return Preset(says="")
        if name not in self.presets:
            hint = near_names(name, self.presets) if self.presets else "without it"
            raise UsageError("--preset", expected="one of the table's", got=name, hint=hint)
        return self.presets[name]

    def check_names(self, rows: Iterable[str], columns: Iterable[str], *, quick: bool, preset: str) -> None:
        """That rows, columns and the preset are the table's, and each cell's method, backbones and partition such.

        Raises:
            UsageError, MethodError: a name is none.
        """
        for row, column in self.choose(rows, columns):
            self.settings_of(row, column, quick=quick, preset=preset).check_names(f"{row.name}, {column.name}")

    def choose(self, rows: Iterable[str], columns: Iterable[str]) -> list[tuple[Row, Column]]:
        """The cells of these rows and columns by name, all where none is named.

        Raises:
            UsageError: for a name that the table does not have.
        """
        wanted_rows = _named("--only", rows, [row.name for row in self.rows])
        wanted_columns = _named("--columns", columns, [column.name for column in self.columns])
        return [
            (row, column)
            for column in self.columns
            for row in self.rows
            if row.name in wanted_rows
            and column.name in wanted_columns
            and (not row.columns or column.name in row.columns)
        ]


def read_table(name: str) -> tuple[str, Table]:
    """A table's name and settings: one of `TABLES`, or a TOML file.

    Raises:
        UsageError: unknown table, unreadable file, unknown or missing setting, wrong kind, or a metric that is none.
    """
    if name in TABLES:
        path = _FOLDER / f"{name}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        raise UsageError(
            "lab table", expected="a table, or a TOML file of your own", got=name, hint=near_names(name, TABLES)
        )
    read = read_toml(path, f"lab table {name}")
    try:
        table = msgspec.convert(read, Table)
    except ValueError as error:  # msgspec's word for a setting that is none
        raise UsageError(f"lab table {name}", expected="a table's settings", got=error) from None
    for entry in (*table.rows, *table.columns):
        if "," in entry.name:
            raise UsageError(f"lab table {name}", expected="names without a comma", got=entry.name)
    for row in table.rows:
        for column in table.columns:
            _check_metric(name, table.metric_of(row, column))
        published = (row.published, row.spread, row.gains, row.sent)
        given = [*row.columns, *(column for numbers in published for column in numbers)]
        _named(f"{name}: columns of {row.name}", given, [c.name for c in table.columns])
        _named(f"{name}: tested", [row.tested] if row.tested else [], list(TABLES))
        _named(f"{name}: reading_of", [row.reading_of] if row.reading_of else [], [other.name for other in table.rows])
        _named(f"{name}: over", [row.over] if row.gains else [], [other.name for other in table.rows])
    _named(f"{name}: against", [table.against] if table.against else [], [row.name for row in table.rows])
    if table.quick is not None:
        _named(f"{name}: bands", table.quick.bands, [row.name for row in table.rows])
    _check_presets(name, table)
    _check_validation(name, table)
    return path.stem, table


def _check_presets(name: str, table: Table) -> None:
    _named(f"{name}: preset", [table.preset] if table.preset else [], list(table.presets))
    for which, preset in table.presets.items():
        _named(f"{name}: rows of preset {which}", preset.rows, [row.name for row in table.rows])
        if which == table.preset and (preset.rows or preset.settings != Settings()):
            got = "settings of its own"
            raise UsageError(
                f"{name}: preset {which}", expected="the settings as they stand, since it is the default", got=got
            )


def _check_validation(name: str, table: Table) -> None:
    """A published number is of the test set, and so is what stands beside it."""
    for row, column in table.choose((), ()):
        beside = any(column.name in numbers for numbers in (row.published, row.gains))
        if beside and table.settings_of(row, column, quick=False).validation:
            got = "validation = true"
            raise UsageError(f"{name}: {row.name}, {column.name}", expected="no published number, or the test", got=got)


def _check_metric(name: str, metric: str) -> None:
    part, slash, way = metric.partition("/")
    if part not in PARTS or not slash or not way:
        raise UsageError(
            f"{name}: metric",
            expected="part/way, as all/head",
            got=metric,
            hint=near_names(part, PARTS) + " with a way",
        )


def _named(option: str, given: Iterable[str], names: list[str]) -> list[str]:
    return [known(names, name, option, "a name of the table") for name in given] or names


def _by_options(partition: str) -> str:
    """How `lab run` takes a partition that came with a number behind a colon; empty for another."""
    scheme, colon, number = partition.partition(":")
    if not colon or scheme not in PARTITIONS:
        return ""
    option = _WITH_NUMBER.get(scheme)
    if option is None:
        return f"--partition {scheme}"
    whole, _, part = number.partition(".")
    fits = f"{whole}{part}".isdigit() and float(number) > 0 and (number.isdigit() or option == "--alpha")
    return f"--partition {scheme} {option} {number if fits else 'NUMBER'}"
