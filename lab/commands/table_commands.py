"""The commands `protofleet lab table` and `protofleet lab results`: run a paper's table, make the pages of ledgers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from protofleet.contract.console.interrupt import Terminated, interruptible
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json, write_text
from protofleet.contract.sums.merge_rules import RULES

__all__ = [
    "ADDRESS_HELP", "ENGINE_HELP", "JOBS_HELP", "LIARS_HELP", "RULE_HELP", "results_command", "table_command",
    "until_stopped",
]  # fmt: skip

ENGINE_HELP = "Who computes: processes of this machine, or ray."
JOBS_HELP = "Clients or runs at a time, each in a process; 1 for this one alone.  [default: one for each core]"
LIARS_HELP = "Clients, drawn by the seed, that say of each training sample that it is of the next class."
RULE_HELP = f"How class means merge, as in aggregate --rule: {', '.join(RULES)}."
ADDRESS_HELP = "HOST:PORT of a Ray cluster that is there already.  [default: Ray on this machine, for this command]"


# arguments: each is an option, as typer reads them
def table_command(
    name: Annotated[
        str | None, typer.Argument(help="A table, or a TOML file of your own; without it the tables are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The fraction that the table states, in minutes.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Run nothing: show what has been run.")] = False,
    preset: Annotated[
        str | None,
        typer.Option(help="Settings by another source: printed, code or framework.  [default: the table's]"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Images as client --data takes them, or a name of the Hub.  [default: the table's]"),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs for each cell.  [default: the table's]")] = None,
    first_seed: Annotated[int, typer.Option(help="The seeds are this one and the following.")] = 0,
    only: Annotated[str | None, typer.Option(help="Rows by name, with commas between.")] = None,
    columns: Annotated[str | None, typer.Option(help="Columns by name, with commas between.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and results are kept; a stopped table goes on there.")] = Path(
        "protofleet-tables"
    ),
    any_code: Annotated[
        bool, typer.Option("--any-code", help="Count finished runs of other versions of the code as well.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the results"))] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Write event files here.")] = None,
    threads: Annotated[int, typer.Option(help="Of each process, within an operator.")] = 1,
    engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "processes",
    jobs: Annotated[int | None, typer.Option(help=JOBS_HELP)] = None,
    address: Annotated[str | None, typer.Option(help=ADDRESS_HELP)] = None,
) -> int:
    """Regenerate a published table: the paper's number beside ours."""
    from protofleet.lab.paper_tables.config import read_table

    if name is None:
        _list_tables()
        return 0
    stem, table = read_table(name)
    if seeds is not None and seeds < 1:
        raise UsageError("--seeds", expected="1 or more", got=seeds)
    if first_seed < 0:
        raise UsageError("--first-seed", expected="0 or more", got=first_seed)
    rows, wanted = (tuple(part.strip() for part in (text or "").split(",") if part.strip()) for text in (only, columns))
    preset = "" if preset == table.preset else preset or ""
    table.check_names(rows, wanted, quick=quick, preset=preset)  # before torch is loaded, which takes seconds
    from protofleet.lab.paper_tables.runner import Order

    order = Order(
        table,
        out / stem,
        data,
        seeds,
        quick,
        rows,
        wanted,
        show,
        first_seed=first_seed,
        preset=preset,
        any_code=any_code,
    )
    from protofleet.lab.workers.engines import open_workers

    def run() -> None:
        given = ("processes", 1, None) if show else (engine, jobs, address)
        with open_workers(given[0], given[1], address=given[2], threads=threads) as workers:
            _fill_table(stem, order, json, tensorboard, workers, Path(name).name)

    return until_stopped(run)


def _list_tables() -> None:
    """Each table with its title, and whether its data ship, or are fetched from the Hub or given as --data."""
    from protofleet.lab.data.datasets import SHIPPED
    from protofleet.lab.paper_tables.config import TABLES, read_table

    width = max(map(len, TABLES))
    for known in TABLES:
        table = read_table(known)[1]
        where = "offline" if table.data in SHIPPED else "needs  "
        typer.echo(f"{known:{width}}  {where}  {table.title}  [{table.data}]")
    typer.echo("offline: its data ship; needs: its data, of the Hub as [owner/name], or by --data FOLDER", err=True)


def results_command(
    folder: Annotated[
        Path, typer.Argument(help="Of ledgers, NAME.json; pages and charts are written beside them.")
    ] = Path("results"),
    take: Annotated[
        list[Path] | None,
        typer.Option(help="First put this ledger of lab table --out into the folder; again for another."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a page is not what its ledger makes.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the names of the files"))] = None,
) -> int:
    """Make every page and chart of tables from its ledger, and the list of every published number; nothing is run."""
    from protofleet.lab.paper_tables import pages

    if check and take:
        raise UsageError("--take with --check", expected="one of them", got="both: --check writes nothing")
    pages.take(folder, *(take or ()))
    changed = pages.differing(folder) if check else [path.name for path in pages.write(folder)]
    write_json(json, {"differing" if check else "written": changed})
    console = beside(json)
    for name in changed:
        console.print(f"{folder / name}", highlight=False, soft_wrap=True)
    if check and changed:
        hint = f"protofleet lab results {folder}, and remove pages whose ledger is gone"
        raise UsageError(
            "--check", expected="pages as their ledgers make them", got=f"{len(changed)} that differ", hint=hint
        )
    console.print(f"{len(changed)} files {'differ' if check else 'written'}", highlight=False)
    return 0


def until_stopped(action: Callable[[], Any]) -> int:
    """Run `action`; Ctrl-C and SIGTERM end it, everything it holds is let go of, and one line says so."""
    try:
        with interruptible(terminable=True):
            action()
    except Terminated:
        typer.echo("error: terminated, every process it started is ended", err=True)
        return 143
    except KeyboardInterrupt:
        typer.echo("error: interrupted, every process it started is ended", err=True)
        return 130
    return 0


def _fill_table(stem: str, order: Any, json: Path | None, tensorboard: Path | None, workers: Any, asked: str) -> None:
    from protofleet.lab.paper_tables.pages import write_sheet
    from protofleet.lab.paper_tables.render import show
    from protofleet.lab.paper_tables.runner import Progress, run_table
    from protofleet.lab.paper_tables.table_ledger import sheet_of
    from protofleet.lab.reporting.progress import stage
    from protofleet.lab.reporting.tensorboard import log_round, open_board

    board = open_board(tensorboard) if tensorboard is not None else None
    console = beside(json)
    with stage(console) as shown, shown.part("table", stem) as part:
        progress = Progress(
            on_run=lambda done, total, title: part.at(done, title or f"{total} runs", of=total),
            on_round=lambda title, record: log_round(board, title, record) if board is not None else None,
            on_text=part.say,
            on_line=part.tell,
        )
        cells = run_table(order, progress, workers)
    if board is not None:
        board.close()
    sheet = sheet_of(stem, order, cells, _command_line(asked, order))
    paths = write_sheet(order.out, sheet, order.table)
    if json is not None:
        write_text(json, paths[0].read_text(encoding="utf-8"))
    console.print(show(sheet))
    console.print(*paths, sep="\n", highlight=False, soft_wrap=True)


def _command_line(asked: str, order: Any) -> str:
    """The command that gives these cells, with the data's place left to the reader."""
    parts = ["protofleet lab table", asked, *(["--quick"] if order.quick else [])]
    parts += [f"--preset {order.preset}"] if order.preset else []
    parts += ["--data DIR"] if order.data else []
    parts += [f"--seeds {order.seeds}"] if order.seeds else []
    parts += [f"--first-seed {order.first_seed}"] if order.first_seed else []
    parts += [f"--only '{','.join(order.rows)}'"] if order.rows else []
    parts += [f"--columns '{','.join(order.columns)}'"] if order.columns else []
    return " ".join(parts)
