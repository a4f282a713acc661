"""The commands `protofleet demo` and `protofleet lab`: options in, a progress display, one table, an exit code.

Those of the papers' tables are in `table_commands.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from protofleet.contract.console.verbosity import QUIET_HELP, VERBOSE_HELP, check_loudness
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, add_json_line, beside, write_json, write_text
from protofleet.contract.methods import DEFAULT, METHOD_HELP
from protofleet.lab.commands.compare_command import compare_command
from protofleet.lab.commands.table_commands import (
    ADDRESS_HELP,
    ENGINE_HELP,
    JOBS_HELP,
    LIARS_HELP,
    RULE_HELP,
    results_command,
    table_command,
    until_stopped,
)
from protofleet.lab.data.partition import PARTITIONS
from protofleet.lab.demo.shipped import METHOD

__all__ = ["demo_command", "lab_app"]

lab_app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Simulate a fleet on one machine or a cluster with the deployed code.",
)


_ROUNDS_HELP = "Rounds of the method.  [default: 5, 1 where it trains nothing]"
_DEMO_DATA_HELP = (
    "A shipped data set, images as client --data takes them, or a name of the Hub.  [default: sign_digits_subset, "
    "colour photos, where the extra photos is installed, else fashion_mnist_subset]"
)
_DEMO_BACKBONE_HELP = (
    "As protofleet export takes it; several with commas between, dealt to the devices.  [default: what is shipped]"
)
_INPUT_HELP = "HxWxc that images are resized to.  [default: their own, or 64x64 where they differ or are large]"


# arguments: each is an option, as typer reads them
def demo_command(
    clients: Annotated[int, typer.Option(help="Devices, each a process.")] = 5,
    rounds: Annotated[int | None, typer.Option(help=_ROUNDS_HELP)] = None,
    method: Annotated[str, typer.Option(help=METHOD_HELP)] = METHOD,
    data: Annotated[str | None, typer.Option(help=_DEMO_DATA_HELP)] = None,
    out: Annotated[Path, typer.Option(help="Where summary.json, report.html and the logs go.")] = Path(
        "protofleet-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of who holds what, the pretraining and the sample order.")] = 0,
    port: Annotated[int, typer.Option(help="Of the broker on 127.0.0.1; 0 for any free one.")] = 0,
    backbone: Annotated[str | None, typer.Option(help=_DEMO_BACKBONE_HELP)] = None,
    input: Annotated[str | None, typer.Option(help=_INPUT_HELP)] = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Pretrain and export a bundle first, with torch; so does a method that trains, other data or a "
            "backbone.",
        ),
    ] = False,
    living: Annotated[
        bool,
        typer.Option(
            "--living",
            help="A month of a fleet that stays instead: devices that sleep and come, a class more, one forgotten. "
            "Takes --out, --seed, --port and what follows.",
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("summary.json, too,"))] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help=VERBOSE_HELP.format("each command it starts, whose logs then hold more")),
    ] = False,
) -> int:
    """A fleet of processes names what none of its devices could, on real images, over MQTT."""
    given = dict(locals())
    check_loudness(quiet, verbose)
    if living:
        _refuse_beside_living(given)
        return _living(out, seed, port, json, quiet=quiet, verbose=verbose)
    from protofleet.lab.demo.run import Demo, run_demo
    from protofleet.lab.reporting.console import demo_table

    console = beside(json, quiet=quiet)
    shape = _shape(input)
    demo = Demo(clients, rounds, method, data, out, seed, port, backbone, verbose, shape, from_scratch)

    def run() -> None:
        summary = run_demo(demo, console)
        write_json(json, summary)
        console.print(demo_table(summary))
        _tell_files(console, out)

    return until_stopped(run)


def _refuse_beside_living(given: Mapping[str, Any]) -> None:
    """Its story says how many devices there are, and what they have."""
    usual = {"clients": 5, "rounds": None, "method": METHOD, "data": None, "backbone": None, "input": None}
    for name, value in {**usual, "from_scratch": False}.items():
        if given[name] != value:
            option = f"--{name.replace('_', '-')} with --living"
            raise UsageError(option, expected="one of them", got="both: the month is told on what is shipped")


def _living(out: Path, seed: int, port: int, json: Path | None, *, quiet: bool, verbose: bool) -> int:
    from protofleet.lab.demo.living.run import Living, run_living
    from protofleet.lab.reporting.console import living_table

    console = beside(json, quiet=quiet)

    def run() -> None:
        summary = run_living(Living(out, seed, port, verbose), console)
        write_json(json, summary)
        console.print(living_table(summary), highlight=False)
        _tell_files(console, out)

    return until_stopped(run)


def _tell_files(console: Console, out: Path) -> None:
    console.print(f"report  {out / 'report.html'}\nsummary {out / 'summary.json'}", highlight=False, soft_wrap=True)


@lab_app.command("list")
def list_command(json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the names"))] = None) -> int:
    """Methods, baselines, backbones, data sets and partitions that `lab run` knows, and tables."""
    from protofleet.export.backbones.backbone import BACKBONES
    from protofleet.lab.data.datasets import SHIPPED
    from protofleet.lab.engine.experiment import lab_methods
    from protofleet.lab.paper_tables.config import TABLES, read_table

    groups = {
        "methods": lab_methods(),
        "backbones": dict.fromkeys(BACKBONES, "") | {"module:callable": "your own"},
        "data": dict.fromkeys(SHIPPED, "ships with the package")
        | {
            "PATH": "images as client --data takes them",
            "owner/name": "a data set of the Hugging Face Hub",
            "A+B": "several of these as one, for the partition source",
        },
        "partitions": {name: scheme.summary for name, scheme in PARTITIONS.items()},
        "tables": {name: read_table(name)[1].title for name in TABLES},
    }
    table = Table.grid(padding=(0, 3))
    for group, names in groups.items():
        for index, (name, text) in enumerate(names.items()):
            table.add_row(group if index == 0 else "", f"[cyan]{name}[/cyan]", text)
        table.add_row()
    write_json(json, groups)
    beside(json).print(table)
    return 0


# arguments: each is an option, as typer reads them
@lab_app.command("run")
def run_command(
    context: typer.Context,
    method: Annotated[str, typer.Option(help="A method of `lab list`.")] = DEFAULT,
    data: Annotated[
        str, typer.Option(help="A shipped data set, images as client --data takes them, or a name of the Hub.")
    ] = "fashion_mnist_subset",
    input: Annotated[str | None, typer.Option(help=_INPUT_HELP)] = None,
    partition: Annotated[str, typer.Option(help="Who holds what: " + ", ".join(PARTITIONS) + ".")] = "dirichlet",
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration; smaller is more uneven.")] = 0.5,
    classes_per_client: Annotated[int, typer.Option(help="For the pathological partition.")] = 3,
    ways: Annotated[int, typer.Option(help="Classes of a client, on average, for the shots partition.")] = 3,
    ways_spread: Annotated[int, typer.Option(help="How far from that, at most.")] = 2,
    shots: Annotated[int, typer.Option(help="Samples of each of them.")] = 100,
    shift: Annotated[str, typer.Option(help="corruption: a kind of it for each client; or none.")] = "none",
    severity: Annotated[int, typer.Option(help="How strong, 1 to 5.")] = 3,
    liars: Annotated[int, typer.Option(help=LIARS_HELP)] = 0,
    rule: Annotated[str, typer.Option(help=RULE_HELP)] = "mean",
    samples: Annotated[int, typer.Option(help="Training samples in all, drawn at random; 0 for every one.")] = 0,
    clients: Annotated[int, typer.Option(help="Devices.")] = 5,
    rounds: Annotated[int | None, typer.Option(help=_ROUNDS_HELP)] = None,
    fraction: Annotated[float, typer.Option(help="Share of the devices sampled in each round.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    backbone: Annotated[
        str, typer.Option(help="As protofleet export takes it; several with commas between, dealt to the devices.")
    ] = "small_cnn",
    head: Annotated[
        str | None, typer.Option(help="frozen: orthonormal and never trained.  [default: the method's]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Batch of a training step.")] = 32,
    trainer: Annotated[
        str, typer.Option(help="What trains networks that stay on devices: the graph onnx, its form kernels, or torch.")
    ] = "onnx",
    set: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, a hyper-parameter; again for another.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Start from these weights.")] = None,
    calibrate: Annotated[bool | None, typer.Option(help="End with FFC.  [default: with one backbone]")] = None,
    ccvr: Annotated[bool, typer.Option("--ccvr", help="End with CCVR, too, where weights are averaged.")] = False,
    positive_rate: Annotated[float, typer.Option(help="Share of a client's samples that is labelled.")] = 1.0,
    local_test: Annotated[float, typer.Option(help="Share of its samples that a client keeps for its own test.")] = 0.0,
    personal: Annotated[list[str] | None, typer.Option(help="fit, head-sgd or head-ffc; again for another.")] = None,
    save_weights: Annotated[
        Path | None, typer.Option(help="Write the backbone of fedavg or spherefed, for protofleet export --weights.")
    ] = None,
    evaluate_every: Annotated[int, typer.Option(help="Rounds between two evaluations.")] = 1,
    settings: Annotated[
        Path | None, typer.Option(help="A TOML file of settings; options that are given go before it.")
    ] = None,
    save_settings: Annotated[Path | None, typer.Option(help="Write them all here, as TOML, defaults too.")] = None,
    engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "processes",
    jobs: Annotated[int | None, typer.Option(help=JOBS_HELP)] = None,
    address: Annotated[str | None, typer.Option(help=ADDRESS_HELP)] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Keep the run here between rounds, and go on from it; removed at the end.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("each round, a line each,"))] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Write event files here.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help=VERBOSE_HELP.format("a line for each device's turn"))
    ] = False,
) -> int:
    """Run one federation and print a line for each round; its clients compute on all cores."""
    from protofleet.lab.run_settings import experiment_of, resolved_text

    given = dict(locals())
    check_loudness(quiet, verbose)
    explicit = {name for name in given if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    experiment = experiment_of(given, explicit)  # refuses wrong names before torch is loaded, which takes seconds
    from protofleet.lab.engine.checkpoint import Checkpoint
    from protofleet.lab.engine.deployed import RoundRecord
    from protofleet.lab.engine.experiment import run_experiment
    from protofleet.lab.reporting.console import gain_line, round_line
    from protofleet.lab.reporting.progress import stage
    from protofleet.lab.reporting.tensorboard import log_round, open_board
    from protofleet.lab.workers.engines import open_workers

    method, rounds, clients = experiment.method, experiment.course.rounds, experiment.partition.clients
    if save_settings is not None:
        write_text(save_settings, resolved_text(experiment), option="--save-settings")
    if save_weights is not None and save_weights.is_dir():  # now, not after the run
        raise UsageError("--save-weights", expected="a file", got=f"the directory {save_weights}")
    if json is not None:
        write_text(json, "")
    console = beside(json, quiet=quiet)
    board = open_board(tensorboard) if tensorboard is not None else None
    records: list[RoundRecord] = []

    def run() -> None:
        with (
            open_workers(engine, jobs, address=address) as workers,
            stage(console) as shown,
            shown.part("run", f"{method}, {clients} clients", rounds * clients) as part,
        ):

            def on_round(record: RoundRecord) -> None:
                records.append(record)
                console.print(round_line(record), highlight=False, soft_wrap=True)
                add_json_line(json, record.as_json())
                if board is not None:
                    log_round(board, method, record)

            def on_device(number: int, turn: int) -> None:
                part.at((number - 1) * clients + turn, f"round {number}")
                if verbose:
                    console.print(f"  round {number}, device {turn + 1} of {clients}", highlight=False)

            run_experiment(
                experiment,
                on_round=on_round,
                on_device=on_device,
                on_text=part.say,
                on_line=part.tell,
                checkpoint=Checkpoint.of(checkpoint, experiment) if checkpoint is not None else None,
                workers=workers,
            )
        if gain_line(records):
            console.print(gain_line(records), highlight=False, soft_wrap=True)
        if board is not None:
            board.close()

    return until_stopped(run)


def _shape(text: str | None) -> tuple[int, int, int] | None:
    from protofleet.export.cli import read_shape

    return None if text is None else read_shape(text)


lab_app.command("compare")(compare_command)
lab_app.command("table")(table_command)
lab_app.command("results")(results_command)
