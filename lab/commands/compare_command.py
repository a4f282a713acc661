"""The command `protofleet lab compare`: several methods on the same clients and seeds, with learning curves.

Every seed divides the data once for all methods, so that differences are paired. A curve is the mean over seeds of the
accuracy on the whole test set, by the method's own way of answering, and its band a standard deviation either way.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from protofleet.contract.console.logs import told as told_to
from protofleet.contract.console.verbosity import QUIET_HELP
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json, write_text
from protofleet.contract.methods import closing_method, method
from protofleet.lab.commands.table_commands import JOBS_HELP, LIARS_HELP, RULE_HELP, until_stopped
from protofleet.lab.data.partition import PARTITIONS
from protofleet.lab.method_names import sends_class_means, usual_way

if TYPE_CHECKING:
    from protofleet.lab.engine.deployed import RoundRecord

__all__ = ["compare_command"]

SCHEMA = "protofleet.comparison/1"
_KINDS = ("fed", "ffc", "pooled", "local")


@dataclass(frozen=True)
class Compared:
    """One method: accuracies (S, R) by seed and round as fractions, after its closing, and bytes sent."""

    method: str
    way: str
    rounds: Sequence[int]
    accuracy: Sequence[Sequence[float]]
    closed: Sequence[float]
    uplink_bytes: float


# arguments: each is an option, as typer reads them
def compare_command(
    methods: Annotated[str, typer.Argument(help="Methods of `lab list`, with commas between.")],
    seeds: Annotated[int, typer.Option(help="Runs of each method; the data is divided anew for each.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The seeds are this one and the following.")] = 0,
    data: Annotated[
        str, typer.Option(help="A shipped data set, images as client --data takes them, or a name of the Hub.")
    ] = "fashion_mnist_subset",
    partition: Annotated[str, typer.Option(help="Who holds what: " + ", ".join(PARTITIONS) + ".")] = "dirichlet",
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration; smaller is more uneven.")] = 0.5,
    liars: Annotated[int, typer.Option(help=LIARS_HELP)] = 0,
    rule: Annotated[str, typer.Option(help=RULE_HELP + " Methods that send none take mean.")] = "mean",
    samples: Annotated[int, typer.Option(help="Training samples in all, drawn at random; 0 for every one.")] = 0,
    clients: Annotated[int, typer.Option(help="Devices.")] = 5,
    rounds: Annotated[int | None, typer.Option(help="Rounds of each method.  [default: each method's]")] = None,
    backbone: Annotated[str, typer.Option(help="As protofleet export takes it.")] = "small_cnn",
    settings: Annotated[
        Path | None, typer.Option(help="A TOML file of settings for all methods; options that are given go before it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the learning curves here, as SVG.")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("every accuracy"))] = None,
    jobs: Annotated[int | None, typer.Option(help=JOBS_HELP)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> int:
    """Run several methods on the same clients and seeds; a table with the spread over seeds, and learning curves."""
    names = tuple(dict.fromkeys(part.strip() for part in methods.split(",") if part.strip()))
    if not names:
        raise UsageError("methods", expected="names with commas between", got=methods, hint="protofleet lab list")
    if seeds < 1:
        raise UsageError("--seeds", expected="1 or more", got=seeds)
    if first_seed < 0:
        raise UsageError("--first-seed", expected="0 or more", got=first_seed)
    if plot is not None and plot.suffix != ".svg":
        raise UsageError("--plot", expected="a file that ends in .svg", got=plot)
    if quiet and plot is None and json is None:
        raise UsageError("--quiet", expected="--json or --plot, where the result goes", got="neither")
    given = {"data": data, "partition": partition, "alpha": alpha, "samples": samples, "clients": clients}
    given |= {"liars": liars, "rule": rule, "rounds": rounds, "backbone": backbone, "settings": settings}
    told = {name for name in given if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    chosen = [[_experiment(name, first_seed + n, given, told) for n in range(seeds)] for name in names]
    if plot is not None:
        write_text(plot, "", option="--plot")  # a path that cannot be written is known now

    def run() -> None:
        from protofleet.lab.data.datasets import load_dataset
        from protofleet.lab.engine.experiment import run_experiment
        from protofleet.lab.reporting.progress import stage
        from protofleet.lab.workers.engines import open_workers

        console, found = beside(json, quiet=quiet), list[Compared]()
        with (
            open_workers("processes", jobs, address=None) as workers,
            stage(console) as shown,
            shown.part("run", "methods and seeds", len(names) * seeds) as part,
        ):
            part.say("loading the data")
            with told_to(part.tell):  # once: all runs have the same
                loaded = load_dataset(chosen[0][0].data, chosen[0][0].input_shape)
            for number, (name, experiments) in enumerate(zip(names, chosen, strict=True)):
                runs: list[list[RoundRecord]] = []
                for turn, experiment in enumerate(experiments):
                    part.at(number * seeds + turn, f"{name}, seed {first_seed + turn}")
                    records: list[RoundRecord] = []
                    run_experiment(
                        experiment,
                        on_round=records.append,
                        on_device=lambda number, turn: None,
                        on_text=part.say,
                        on_line=part.tell,
                        data=loaded,
                        workers=workers,
                    )
                    runs.append(records)
                found.append(_compared(name, runs))
        console.print(_table(found))
        console.print(
            "right: of all classes of the test set, mean over seeds; sent: by a client, all rounds", style="dim"
        )
        if plot is not None:
            write_text(plot, _plot(found), option="--plot")
        write_json(json, _told(found, range(first_seed, first_seed + seeds)))

    return until_stopped(run)


def _experiment(name: str, seed: int, given: dict[str, Any], told: set[str]) -> Any:
    """The experiment that `lab run` would make of this."""
    from protofleet.lab.commands.lab_cli import run_command
    from protofleet.lab.run_settings import experiment_of

    if not sends_class_means(name):
        given = given | {"rule": "mean"}
    usual = {each.name: each.default for each in inspect.signature(run_command).parameters.values()}
    return experiment_of(usual | given | {"method": name, "seed": seed}, {*told, "method", "seed"})


def _compared(name: str, runs: Sequence[Sequence[RoundRecord]]) -> Compared:
    closing = closing_method()
    own = [[each for each in records if name == closing.name or each.method != closing.name] for records in runs]
    mine = [[each for each in records if each.all_classes] for records in own]  # a round may be run without a test
    usual = usual_way(name)
    way = usual if usual in mine[0][0].all_classes else next(iter(mine[0][0].all_classes))
    ended = [records[-1].all_classes for records in runs if way != closing.way]  # of a baseline, in its last round
    closed = [every[closing.way] for every in ended if closing.way in every]
    return Compared(
        name,
        way,
        [record.round for record in mine[0]],
        [[record.all_classes[way] for record in records] for records in mine],
        closed,
        float(np.mean([sum(record.uplink_bytes for record in records) for records in runs])),
    )


def _table(found: Sequence[Compared]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    first = found[0]
    table.add_column("method", overflow="fold")  # 80 columns hold the figures whole, whatever a method is called
    table.add_column("answers by", no_wrap=True)
    for heading in ("rounds", "right", "± seeds", f"to {_short(first.method)}", "with FFC", "sent"):
        table.add_column(heading, justify="right", overflow="fold")
    from protofleet.hw_profiles.units import nice_bytes

    for each in found:
        last = np.array([seed[-1] for seed in each.accuracy])
        spread = f"{100 * last.std(ddof=1):.2f}" if len(last) > 1 else "one seed"
        closed = f"{np.mean(each.closed):.1%}" if each.closed else ""
        apart = "" if each is first else _apart(each, first)
        table.add_row(
            _short(each.method), each.way, str(each.rounds[-1]), f"{last.mean():.1%}", spread, apart, closed,
            nice_bytes(each.uplink_bytes),
        )  # fmt: skip
    return table


def _short(name: str) -> str:
    """A method's own name: of `package.module:Class` that which it was loaded by."""
    return method(name).name if ":" in name else name


def _apart(each: Compared, first: Compared) -> str:
    """The mean of the differences, seed by seed, in points, with half its 95 % interval."""
    from protofleet.lab.paper_tables.seeds import half_interval

    points = [100 * (a[-1] - b[-1]) for a, b in zip(each.accuracy, first.accuracy, strict=True)]
    half = half_interval(points)
    return f"{np.mean(points):+.1f}" + ("" if half is None else f" ± {half:.1f}")


def _plot(found: Sequence[Compared]) -> str:
    from protofleet.hw_profiles.charts.curves import Line, curves
    from protofleet.hw_profiles.charts.marks import standalone

    most = max(found, key=lambda each: len(each.rounds)).rounds
    lines = []
    for place, each in enumerate(found):
        values = np.array(each.accuracy)  # (S, R)
        band = values.std(axis=0, ddof=1).tolist() if len(values) > 1 else ()
        kind = _KINDS[place % len(_KINDS)]
        first = most.index(each.rounds[0]) if each.rounds[0] in most else 0
        lines.append(
            Line(_short(each.method), kind, values.mean(axis=0).tolist(), first, dashed=place >= len(_KINDS), band=band)
        )
    seeds = len(found[0].accuracy)
    title = f"Right on all classes, mean of {seeds} seed{'s' * (seeds > 1)}; bands are a standard deviation"
    axis = f"after round; mean and deviation of {seeds} seeds" if seeds > 1 else "after round; one seed"
    return standalone(curves(lines, [str(number) for number in most], title, axis=axis))


def _told(found: Sequence[Compared], seeds: Sequence[int]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "seeds": list(seeds),
        "methods": [
            {
                "method": each.method,
                "way": each.way,
                "rounds": list(each.rounds),
                "all_classes": [list(row) for row in each.accuracy],
                "closing": list(each.closed),
                "uplink_bytes": each.uplink_bytes,
            }
            for each in found
        ],
    }
