"""The front door: the `protofleet` command.

It knows each room's commands by name. It imports a room only when a command of that room is called, so `protofleet
client` on a 512 MB board never loads what `protofleet export` needs. Every error that Protofleet raises on purpose
becomes one line on standard error here, with its exit code. A traceback is a bug.
"""

from __future__ import annotations

import signal
import sys

from protofleet.contract.console.interrupt import hold_back, leave_at_once

if __name__ == "__main__" or sys.argv[0].endswith("/protofleet"):  # not where it is imported as a library
    leave_at_once()
    if sys.argv[1:2] == ["client"]:
        hold_back(signal.SIGUSR1)  # until its process answers it

import errno
import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from protofleet.contract.console import logs
from protofleet.contract.errors import ProtofleetError, StoreError, UsageError, near_names
from protofleet.contract.extras import install_command
from protofleet.contract.printable import keep_printable, undisclosed, undisclosed_if_url
from protofleet.versions import __version__

__all__ = ["COMMANDS", "main"]


@dataclass(frozen=True)
class Command:
    """Where a command lives (`module:name` of a function or a Typer app), the extra it needs, and its line of help.

    Attributes:
        below: commands whose names stand in the place of the first argument, as `sweep` in `cost sweep`.
    """

    target: str
    extra: str | None
    summary: str
    below: Mapping[str, str] = field(default_factory=dict)


COMMANDS = {
    "init": Command("protofleet.commands.init:init_command", None, "From a folder of photos to a fleet you can start."),
    "demo": Command(
        "protofleet.lab.commands.lab_cli:demo_command",
        "demo",
        "A fleet names what none of its devices could, on real images.",
    ),
    "export": Command(
        "protofleet.commands.export:export_command", "export", "Turn a backbone and a method into one bundle file."
    ),
    "inspect": Command("protofleet.commands.inspect:inspect_command", None, "Show what a bundle or a message holds."),
    "profile": Command(
        "protofleet.commands.profile:profile_command", None, "Latency, memory, energy on devices; --measure: here."
    ),
    "plan": Command(
        "protofleet.commands.plan:plan_command", "export", "A fleet's bill, and the cheapest choice that meets a goal."
    ),
    "advise": Command(
        "protofleet.commands.advise:advise_command", None, "Measure on your photos which way gives what for its bytes."
    ),
    "cost": Command(
        "protofleet.hw_profiles.cli:cost_command",
        "export",
        "Cycles and memory on a systolic array; cost sweep: on many.",
        {"sweep": "protofleet.hw_profiles.sweep_cli:sweep_command"},
    ),
    "broker": Command(
        "protofleet.aggregator.commands.aggregate_cli:broker_command", "broker", "Run the embedded MQTT broker."
    ),
    "aggregate": Command(
        "protofleet.aggregator.commands.aggregate_cli:aggregate_command",
        None,
        "Run rounds: announce, receive, commit, merge.",
    ),
    "gateway": Command(
        "protofleet.gateway.cli:gateway_command", None, "Aggregate a site: its devices' sums go up as one contribution."
    ),
    "helper": Command(
        "protofleet.aggregator.helper.cli:helper_command",
        "security",
        "Open the sums of blinded rounds, for another party.",
    ),
    "forget": Command(
        "protofleet.aggregator.commands.fleet_cli:forget_command",
        None,
        "Take a device out of what the fleet has learned, exactly.",
    ),
    "fleet": Command(
        "protofleet.aggregator.commands.fleet_keys_cli:fleet_app",
        None,
        "See a fleet's devices; invite, admit, pause; back up.",
    ),
    "status": Command(
        "protofleet.aggregator.commands.fleet_status_cli:status_command",
        None,
        "Whether all is well with a fleet, and who needs care.",
    ),
    "watch": Command(
        "protofleet.aggregator.commands.fleet_status_cli:watch_command", None, "Watch a fleet in the terminal."
    ),
    "pki": Command("protofleet.commands.pki:pki_app", "security", "Certificates for a fleet, and the broker's files."),
    "rollout": Command(
        "protofleet.aggregator.commands.rollout_cli:rollout_command", None, "Roll a bundle out to devices in stages."
    ),
    "client": Command(
        "protofleet.edge_client.run.cli:client_command", None, "Run one device: train, summarise, publish."
    ),
    "predict": Command(
        "protofleet.commands.predict:predict_command", None, "Answer about photos, a folder or a camera."
    ),
    "suggest": Command(
        "protofleet.commands.suggest:suggest_command", None, "Say which photos to name next: those that teach most."
    ),
    "labels": Command(
        "protofleet.commands.labels:labels_command", None, "Say whether enough photos are named, class by class."
    ),
    "photos": Command(
        "protofleet.commands.photos:photos_command", None, "Say which photos of its camera a device keeps; --erase."
    ),
    "learn": Command("protofleet.commands.learn:learn_command", None, "Teach a device a photo and its label."),
    "unlearn": Command("protofleet.commands.learn:unlearn_command", None, "Take a learned photo out again."),
    "model": Command(
        "protofleet.commands.model:model_command", "export", "Write what was learned as one plain ONNX file."
    ),
    "doctor": Command(
        "protofleet.commands.doctor:doctor_command",
        None,
        "Whether machine, bundle, broker and disk serve.",
    ),
    "lab": Command(
        "protofleet.lab.commands.lab_cli:lab_app", "all", "Simulate a fleet on this machine with the deployed code."
    ),
}

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
_OF_THE_DEMO = ("iotcore", "jinja2")  # what the extra `demo` brings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "_PROTOFLEET_COMPLETE" in os.environ and argv is None:
        return _complete()
    keep_printable(sys.stdout, sys.stderr)
    try:
        return _dispatch(args)
    except ProtofleetError as error:
        return _refuse(error, error.exit_code)
    except (KeyboardInterrupt, _Interrupted):
        return _refuse("interrupted", 130)
    except MemoryError as error:
        return _refuse(f"not enough memory ({error or 'Python says no more'})", 1)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.errno in _MACHINE:
            return _refuse(_refused_by_machine(error), StoreError.exit_code)
        if error.errno in _PATH and isinstance(error.filename, str):
            return _refuse(_barred(error), UsageError.exit_code)
        raise
    finally:
        logs.tear_down()


def _refused_by_machine(error: OSError) -> StoreError:
    """The error for a full or a read-only disk. It can happen at any file, so no room checks for it."""
    where = error.filename if isinstance(error.filename, str) else "a file"
    got, hint = error.strerror, "freeing space, or another place"
    return StoreError(f"cannot write {where}", expected="a disk that takes it", got=got, hint=hint)


def _barred(error: OSError) -> UsageError:
    """The error for a path that this user may not read, or that no file can have. No room checks for it."""
    return UsageError(f"cannot open {error.filename}", expected="a path that this user may open", got=error.strerror)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        _print_help()
        return 0
    if args[0] == "--version":
        print(f"protofleet {__version__}")
        return 0
    if args[0] in ("--install-completion", "--show-completion"):
        return _completion(args[0], args[1:])
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        got, hint = undisclosed_if_url(name), near_names(name, COMMANDS)
        raise UsageError("unknown command", expected="a protofleet command", got=got, hint=hint)
    try:
        return _call(name, rest)
    except ModuleNotFoundError as error:  # when the command's module loads, or later: torch is loaded as late as can be
        raise _missing_package(name, error) from None


def _call(name: str, rest: list[str]) -> int:
    below = rest[0] if rest and rest[0] in COMMANDS[name].below else None
    app, shown = _load(name, below), f"{name} {below}" if below else name
    try:
        result = app(rest[1:] if below else rest, prog_name=f"protofleet {shown}", standalone_mode=False)
    except Exception as error:
        # Typer carries its own copy of click since 0.17, so a usage error is known by what it offers, not by its class.
        if not hasattr(error, "format_message"):
            raise
        raise _wrong_use(error, shown, rest) from None
    return result if isinstance(result, int) else 0


def _wrong_use(error: Any, name: str, rest: list[str]) -> UsageError:
    """The parser's error in our own form: what was expected, and what the user gave.

    An argument that may be a URL, or an unquoted piece of one, is shown only by its length: it may hold a password.
    """
    context, option, param = (getattr(error, attribute, None) for attribute in ("ctx", "option_name", "param"))
    command = context.command_path if context is not None else f"protofleet {name}"
    commands, manual = getattr(context and context.command, "commands", {}), f"{command} --help"
    if hasattr(error, "possibilities"):
        near = near_names(option, context.help_option_names + [o for p in context.command.params for o in p.opts])
        return UsageError(
            "unknown option", expected=f"an option of {command}", got=undisclosed_if_url(option), hint=near
        )
    if option:
        expected, got = ("a value", "none") if "requires" in error.message else ("no value", "one")
        return UsageError(option, expected=expected, got=got, hint=manual)
    barred = re.search(r"'(.+)' is not readable", error.message) if param is not None else None
    if barred:
        hint = f"ls -l {barred[1]}"
        return UsageError(f"cannot read {barred[1]}", expected="a readable file", got="Permission denied", hint=hint)
    if param is not None:
        outside = re.search(r"should be ((greater|less) .+)", error.message)
        parts = [part for item in rest for part in (item.split("=", 1) if item.startswith("--") else [item])]
        got = next((value for name, value in pairwise(parts) if name in param.opts), "none")
        kind = re.search(r"valid \w+", error.message)
        label = param.opts[0] if param.opts[0].startswith("-") else param.metavar or param.name
        expected = outside[1] if outside else f"a {kind[0] if kind else 'value'}"
        return UsageError(label, expected=expected, got=undisclosed_if_url(got), hint=manual)
    if commands:
        near = near_names(rest[0], commands) if rest else " or ".join(commands)
        return UsageError(command, expected="a command", got=undisclosed_if_url(rest[0]) if rest else "none", hint=near)
    message = error.format_message().rstrip(".")
    if undisclosed_if_url(message) != message:
        message, _, arguments = message.partition("(")
        message += f"({undisclosed(arguments.rstrip(')'))})"
    return UsageError(f"{command}: {message}", hint=manual)


def _load(name: str, below: str | None = None) -> typer.Typer:
    target = _target(COMMANDS[name].target if below is None else COMMANDS[name].below[below])
    if isinstance(target, typer.Typer):
        return target
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=target.__doc__, context_settings=_SETTINGS)(_audible(target))
    return app


def _target(place: str) -> Any:
    module_name, attribute = place.split(":")
    return getattr(importlib.import_module(module_name), attribute)


class _Interrupted(BaseException):
    """Ctrl-C as a class that Typer does not know. Of KeyboardInterrupt it would make an exit code without a message."""


def _audible(target: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(target)
    def command(*args: Any, **options: Any) -> Any:
        try:
            return target(*args, **options)
        except KeyboardInterrupt:
            raise _Interrupted from None

    return command


def _completion(option: str, rest: list[str]) -> int:
    """Print the shell's completion script, or install it. The shell is the first argument, or else $SHELL."""
    from typer.completion import Shells, get_completion_script, install

    shell = rest[0] if rest else os.environ.get("SHELL", "").rpartition("/")[2]
    known = [entry.value for entry in Shells]
    if shell not in known:
        raise UsageError(option, expected="a shell", got=shell or "none", hint=near_names(shell, known))
    if option == "--show-completion":
        variable = "_PROTOFLEET_COMPLETE"
        print(get_completion_script(prog_name="protofleet", complete_var=variable, shell=shell))
        return 0
    try:
        _, path = install(shell=shell, prog_name="protofleet", complete_var="_PROTOFLEET_COMPLETE")
    except OSError as error:
        raise UsageError(option, expected="a file that can be written", got=error.strerror) from None
    print(f"completion for {shell} is in {path}; it works in the next shell")
    return 0


def _complete() -> int:
    """Answer the shell, which puts the words typed so far into the environment. Loads only the named command."""
    from typer.main import get_command

    words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    named = next((word for word in words[1:] if word in COMMANDS), None)
    whole = typer.Typer(add_completion=True, rich_markup_mode=None, context_settings=_SETTINGS)
    for name, command in COMMANDS.items():
        if name != named:
            whole.command(name, help=command.summary)(lambda: None)
        elif below := next((word for word in words[2:3] if word in command.below), None):
            parts = typer.Typer()
            parts.command(below)(_target(command.below[below]))
            parts.callback()(lambda: None)
            whole.add_typer(parts, name=name)
        elif isinstance(target := _target(command.target), typer.Typer):
            whole.add_typer(target, name=name)
        else:
            whole.command(name)(target)
    get_command(whole)(prog_name="protofleet")
    return 0


def _missing_package(name: str, error: ModuleNotFoundError) -> Exception:
    """An error that says which extra to install. When a module of Protofleet is missing, the error itself."""
    package, extra = (error.name or "").split(".")[0], COMMANDS[name].extra
    if extra is None or package == "protofleet":
        return error
    if name == "demo" and package not in _OF_THE_DEMO:  # it makes a bundle of its own, or loads other images
        extra = "all"
    return UsageError(
        f"protofleet {name} needs a package that is not installed",
        expected=error.name,
        got="nothing",
        hint=install_command(extra),
    )


def _print_help() -> None:
    console = Console()
    console.print("[bold]protofleet[/bold] COMMAND [OPTIONS]    one backbone, many devices, no weights on the wire\n")
    table = Table.grid(padding=(0, 2))
    for name, command in COMMANDS.items():
        table.add_row(f"  [cyan]{name}[/cyan]", command.summary)
    console.print(table)
    console.print(
        "\nprotofleet COMMAND -h tells each command's options; protofleet --version the version;\n"
        "protofleet --install-completion completes commands and options in your shell."
    )


def _refuse(error: object, code: int) -> int:
    logs.report(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
