"""The command `protofleet rollout`: a bundle for a fleet's devices, in stages, and how far it is.

1. A bundle is checked before anything is recorded: it is whole, signed, and this fleet's devices can go over to it.
2. Its bytes are put into the store, and the order beside them.
3. The running aggregator does the rest, or the next one that is started
   (`aggregator/parts/rollout_coordinator.py`).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from protofleet.aggregator.commands.fleet_cli import WAIT_S, StorePlace, ask, check_telling, operator, tell
from protofleet.aggregator.database import Place, bring_up, read_only
from protofleet.aggregator.rollout.rollout_stages import STAGES, Plan, Rollout
from protofleet.aggregator.store.durable_store import as_written
from protofleet.aggregator.store.rollout_tables import give_rollout, rollout_in
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.console.durations import in_words, seconds
from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import BundleError, UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire.rollout_messages import MAX_BUNDLE_BYTES, RolloutReport
from protofleet.contract.wire.topics import check_id

__all__ = ["rollout_command"]

SCHEMA = "protofleet.rollout/1"
_SHOWN = 20
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


# arguments: each is an option, as typer reads them
def rollout_command(
    store: StorePlace,
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="The signed bundle; without it, see how far one is.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PERCENT",
            help="Of the devices; again for each further stage.  [default: 10%, 50%, 100%]  Without BUNDLE: go to this "
            "one now.",
        ),
    ] = None,
    soak: Annotated[str, typer.Option(metavar="DURATION", help="How long a stage lasts at least.")] = "1h",
    healthy: Annotated[
        str,
        typer.Option(metavar="PERCENT", help="Of a stage's devices that must be healthy; it halts when more fail."),
    ] = "90%",
    to_fleet: Annotated[
        str | None, typer.Option(metavar="ID", help="The devices go over to this fleet: for another backbone.")
    ] = None,
    halt: Annotated[bool, typer.Option("--halt", help="Nobody begins with it any more; who uses it goes on.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after a halt, in the same stage.")] = False,
    end: Annotated[
        bool, typer.Option("--end", help="Roll nothing out any more, and give the bundle's space up.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a running aggregator to have done it.")] = WAIT_S,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("what was found or done"))] = None,
) -> int:
    """Roll a bundle out to a fleet's devices in stages, halt it, or see how far it is."""
    switches = {"rollout-halt": halt, "rollout-resume": resume, "rollout-end": end}
    requested = [what for what, given in switches.items() if given]
    requested += ["rollout-stage"] if stage and bundle is None else []
    if len(requested) + (bundle is not None) > 1:
        raise UsageError(
            "protofleet rollout", expected="one of BUNDLE, --stage, --halt, --resume and --end", got="more"
        )
    if bundle is not None:
        return _begin(bundle, store, stage or [], soak, healthy, to_fleet, wait, json)
    if to_fleet is not None:
        raise UsageError("--to-fleet", expected="a BUNDLE beside it", got="none")
    if not requested:
        return _show(store, json)
    (what,) = requested
    detail = repr(_share("--stage", _only(stage))) if what == "rollout-stage" else ""
    return ask(what, store, "", wait, json, detail=detail)


def _begin(
    path: Path,
    store: Place,
    stage: list[str],
    soak: str,
    healthy: str,
    to_fleet: str | None,
    wait_s: float,
    json: Path | None,
) -> int:
    check_telling(wait_s, json)
    stages = tuple(_share("--stage", share_text) for share_text in stage) or STAGES
    if list(stages) != sorted(set(stages)):
        raise UsageError("--stage", expected="rising stages", got=", ".join(stage))
    soak_s, share = seconds("--soak", soak), _share("--healthy", healthy)
    running = bring_up(store, KIND)
    new_bundle = read_bundle(path)
    blob = path.read_bytes()
    _check_bundle(path, new_bundle, blob)
    with read_only(store, KIND) as db, as_written(store):
        meta = {name: memoryview(value).tobytes() for name, value in db.execute("SELECT name, value FROM meta")}
        under_way = rollout_in(db)
    _check_free(under_way, store)
    _check_fit(path, new_bundle, meta, to_fleet)
    plan = Plan(new_bundle.sha256, new_bundle.manifest.version, len(blob), to_fleet or "", soak_s, share)
    return tell(give_rollout(store, blob, plan, stages, operator()), running, store, wait_s, json)


def _check_bundle(path: Path, bundle: Bundle, blob: bytes) -> None:
    """That devices would take it: they hold a key, and versions rise."""
    if hashlib.sha256(blob).digest() != bundle.sha256:
        raise BundleError(f"{path}", expected="a file that stays as it is", got="one that changed while it was read")
    if not bundle.signed:
        hint = "protofleet export … --sign KEY, and client --trust on the devices"
        raise BundleError(f"{path}", expected="a signed bundle", got="one without a signature", hint=hint)
    if not 1 <= bundle.manifest.version < 2**32 or len(blob) > MAX_BUNDLE_BYTES:
        got = f"version {bundle.manifest.version}, {len(blob):,} bytes"
        raise BundleError(f"{path}", expected="a version from 1 on, and at most 2 GiB", got=got)


def _check_free(under_way: Rollout | None, store: Place) -> None:
    if under_way is not None and under_way.state != "complete":
        raise UsageError(
            f"--store {store}",
            expected="no other roll-out under way",
            got=f"version {under_way.plan.version} at {_percent(under_way.fraction)}, {under_way.state}",
            hint="rollout --end",
        )


def _check_fit(path: Path, bundle: Bundle, meta: Mapping[str, bytes], to_fleet: str | None) -> None:
    """That the fleet's devices can go over to it.

    Args:
        meta: what the store says of itself.
    """
    if to_fleet is not None:
        check_id(to_fleet, "--to-fleet")
        if to_fleet.encode() == meta.get("fleet"):
            raise UsageError("--to-fleet", expected="another fleet than the store's", got=to_fleet)
        return
    if not bundle.manifest.extends:
        raise UsageError(
            f"{path}",
            expected="a bundle that extends the fleet's",
            got="one that extends none",
            hint="export --extend, or --to-fleet ID for another backbone",
        )
    if bundle.sha256 != meta.get("bundle"):
        extends = meta.get("bundle", b"") in bundle.manifest.extended
        raise UsageError(
            f"{path}",
            expected="the bundle that the aggregator runs with",
            got="one that extends it" if extends else "another",
            hint=f"the aggregator first: aggregate --bundle {path}",
        )


def _show(store: Place, json: Path | None) -> int:
    with read_only(store, KIND) as db, as_written(store):
        rollout = rollout_in(db)
        counts = {} if rollout is None else rollout.counts()
    write_json(json, {"schema": SCHEMA, "rollout": None if rollout is None else _content(rollout)})
    console = beside(json)
    if rollout is None:
        console.print("nothing is rolled out", highlight=False)
        return 0
    plan = rollout.plan
    target = f" to fleet {plan.fleet}" if plan.fleet else ""
    why = f": {printable(rollout.reason)}" if rollout.reason else ""
    further = ", ".join(map(_percent, rollout.stages))
    last = "" if rollout.fraction >= 1 else ", its last stage; --stage 100% goes on"
    then = f", then {further}" if further else last
    careful = f"a stage lasts {in_words(plan.soak_s)} or longer and needs {_percent(plan.healthy)} healthy"
    for line in (
        f"version {plan.version} ({plan.sha256.hex()[:12]}…, {plan.size_bytes:,} bytes){target}: {rollout.state}{why}",
        f"offered to {_percent(rollout.fraction)} since {_when(rollout.since)}{then}; {careful}",
        _known(rollout, counts),
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    wrong = [(d, t) for d, t in rollout.told.items() if t is not None and t.word in ("failed", "refused")]
    if wrong:
        show_table(console, ("device", "says"), [(d, _report_text(t)) for d, t in wrong[:_SHOWN]], words=(0, 1))
    return 0


def _known(rollout: Rollout, counts: Mapping[str, int]) -> str:
    """What the known devices of the stage say; where there is none, what is waited for."""
    tallies = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    if tallies:
        return f"{counted(sum(counts.values()), 'device')} of it known: {tallies}"
    if not rollout.told:
        return "no device of it known yet: each says which bundle it uses when the running aggregator hears it"
    soak = in_words(rollout.plan.soak_s)
    return (
        f"none of the {counted(len(rollout.told), 'known device')} is among these; after {soak} the first is taken in"
    )


def _content(rollout: Rollout) -> dict[str, Any]:
    """A roll-out as `--json` writes it."""
    plan = asdict(rollout.plan) | {"sha256": rollout.plan.sha256.hex()}
    inside = rollout.members()
    devices = {
        device: {"told": None if report is None else report.word, "reason": "" if report is None else report.reason}
        | {"in_stage": device in inside}
        for device, report in rollout.told.items()
    }
    stands = {"state": rollout.state, "reason": rollout.reason, "fraction": rollout.fraction, "stages": rollout.stages}
    return plan | stands | {"since": rollout.since, "counts": dict(rollout.counts()), "devices": devices}


def _report_text(report: RolloutReport) -> str:
    return printable(f"{report.word}: {report.reason}" if report.reason else report.word)


def _only(stage: list[str] | None) -> str:
    if not stage or len(stage) > 1:
        raise UsageError("--stage", expected="one, without BUNDLE", got=len(stage or ()))
    return stage[0]


def _share(option: str, text: str) -> float:
    """A percentage as a fraction, above 0 up to 1."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / 100.0 if match is not None else 0.0
    if not 0.0 < share <= 1.0:
        raise UsageError(option, expected="a percentage above 0% up to 100%, such as 10%", got=text)
    return share


def _percent(share: float) -> str:
    return f"{100.0 * share:.3g} %"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
