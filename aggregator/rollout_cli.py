"""The command `protofleet rollout`: a bundle for a fleet's devices, in stages, and how far it is.

A bundle is checked here, before anything is recorded: it is whole, signed, and one that this fleet's devices can go
over to. Its bytes are then put into the store, and the order beside them; the aggregator does the rest
(`aggregator/rollout_desk.py`), the one that runs or the next one that is started.
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

from aggregator.database import Place, bring_up, read_only
from aggregator.fleet_cli import WAIT_S, StorePlace, ask, check_telling, operator, tell
from aggregator.rollout import STAGES, Plan, Rollout
from aggregator.rollout_store import give_rollout, rollout_in
from aggregator.store import as_written
from aggregator.store_schema import KIND
from contract.bundle import Bundle, read_bundle
from contract.durations import in_words, seconds
from contract.errors import BundleError, UsageError
from contract.json_output import JSON_HELP, beside, write_json
from contract.offers import MAX_BUNDLE_BYTES, Told
from contract.tables import show_table
from contract.terminal import counted, printable
from contract.topics import check_id

__all__ = ["rollout_command"]

SCHEMA = "protofleet.rollout/1"
_SHOWN = 20
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


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
    words = {"rollout-halt": halt, "rollout-resume": resume, "rollout-end": end}
    asked = [what for what, given in words.items() if given]
    asked += ["rollout-stage"] if stage and bundle is None else []
    if len(asked) + (bundle is not None) > 1:
        raise UsageError(
            "protofleet rollout", expected="one of BUNDLE, --stage, --halt, --resume and --end", got="more"
        )
    if bundle is not None:
        return _begin(bundle, store, stage or [], soak, healthy, to_fleet, wait, json)
    if to_fleet is not None:
        raise UsageError("--to-fleet", expected="a BUNDLE beside it", got="none")
    if not asked:
        return _show(store, json)
    (what,) = asked
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
    stages = tuple(_share("--stage", each) for each in stage) or STAGES
    if list(stages) != sorted(set(stages)):
        raise UsageError("--stage", expected="rising stages", got=", ".join(stage))
    soak_s, share = seconds("--soak", soak), _share("--healthy", healthy)
    running = bring_up(store, KIND)
    found = read_bundle(path)
    blob = path.read_bytes()
    _check_bundle(path, found, blob)
    with read_only(store, KIND) as db, as_written(store):
        meta = {name: memoryview(value).tobytes() for name, value in db.execute("SELECT name, value FROM meta")}
        under_way = rollout_in(db)
    _check_free(under_way, store)
    _check_fit(path, found, meta, to_fleet)
    plan = Plan(found.sha256, found.manifest.version, len(blob), to_fleet or "", soak_s, share)
    return tell(give_rollout(store, blob, plan, stages, operator()), running, store, wait_s, json)


def _check_bundle(path: Path, found: Bundle, blob: bytes) -> None:
    """That devices would take it: they hold a key, and versions rise."""
    if hashlib.sha256(blob).digest() != found.sha256:
        raise BundleError(f"{path}", expected="a file that stays as it is", got="one that changed while it was read")
    if not found.signed:
        hint = "protofleet export … --sign KEY, and client --trust on the devices"
        raise BundleError(f"{path}", expected="a signed bundle", got="one without a signature", hint=hint)
    if not 1 <= found.manifest.version < 2**32 or len(blob) > MAX_BUNDLE_BYTES:
        got = f"version {found.manifest.version}, {len(blob):,} bytes"
        raise BundleError(f"{path}", expected="a version from 1 on, and at most 2 GiB", got=got)


def _check_free(under_way: Rollout | None, store: Place) -> None:
    if under_way is not None and under_way.state != "complete":
        raise UsageError(
            f"--store {store}",
            expected="no other roll-out under way",
            got=f"version {under_way.plan.version} at {_percent(under_way.fraction)}, {under_way.state}",
            hint="rollout --end",
        )


def _check_fit(path: Path, found: Bundle, meta: Mapping[str, bytes], to_fleet: str | None) -> None:
    """That the fleet's devices can go over to it.

    Args:
        meta: what the store says of itself.
    """
    if to_fleet is not None:
        check_id(to_fleet, "--to-fleet")
        if to_fleet.encode() == meta.get("fleet"):
            raise UsageError("--to-fleet", expected="another fleet than the store's", got=to_fleet)
        return
    if not found.manifest.extends:
        raise UsageError(
            f"{path}",
            expected="a bundle that extends the fleet's",
            got="one that extends none",
            hint="export --extend, or --to-fleet ID for another backbone",
        )
    if found.sha256 != meta.get("bundle"):
        extends = meta.get("bundle", b"") in found.manifest.extended
        raise UsageError(
            f"{path}",
            expected="the bundle that the aggregator runs with",
            got="one that extends it" if extends else "another",
            hint=f"the aggregator first: aggregate --bundle {path}",
        )


def _show(store: Place, json: Path | None) -> int:
    with read_only(store, KIND) as db, as_written(store):
        found = rollout_in(db)
        counts = {} if found is None else found.counts()
    write_json(json, {"schema": SCHEMA, "rollout": None if found is None else _content(found)})
    console = beside(json)
    if found is None:
        console.print("nothing is rolled out", highlight=False)
        return 0
    plan = found.plan
    to = f" to fleet {plan.fleet}" if plan.fleet else ""
    why = f": {printable(found.reason)}" if found.reason else ""
    further = ", ".join(map(_percent, found.stages))
    last = "" if found.fraction >= 1 else ", its last stage; --stage 100% goes on"
    then = f", then {further}" if further else last
    said = ", ".join(f"{number} {word}" for word, number in counts.items() if number) or "none known"
    careful = f"a stage lasts {in_words(plan.soak_s)} or longer and needs {_percent(plan.healthy)} healthy"
    for line in (
        f"version {plan.version} ({plan.sha256.hex()[:12]}…, {plan.size_bytes:,} bytes){to}: {found.state}{why}",
        f"offered to {_percent(found.fraction)} since {_when(found.since)}{then}; {careful}",
        f"{counted(sum(counts.values()), 'device')} of it known: {said}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    wrong = [(d, t) for d, t in found.told.items() if t is not None and t.word in ("failed", "refused")]
    if wrong:
        show_table(console, ("device", "says"), [(d, _words(t)) for d, t in wrong[:_SHOWN]], words=(0, 1))
    return 0


def _content(found: Rollout) -> dict[str, Any]:
    """A roll-out as `--json` writes it."""
    plan = asdict(found.plan) | {"sha256": found.plan.sha256.hex()}
    inside = found.members()
    devices = {
        device: {"told": None if told is None else told.word, "reason": "" if told is None else told.reason}
        | {"in_stage": device in inside}
        for device, told in found.told.items()
    }
    stands = {"state": found.state, "reason": found.reason, "fraction": found.fraction, "stages": found.stages}
    return plan | stands | {"since": found.since, "counts": dict(found.counts()), "devices": devices}


def _words(told: Told) -> str:
    return printable(f"{told.word}: {told.reason}" if told.reason else told.word)


def _only(stage: list[str] | None) -> str:
    if not stage or len(stage) > 1:
        raise UsageError("--stage", expected="one, without BUNDLE", got=len(stage or ()))
    return stage[0]


def _share(option: str, given: str) -> float:
    """A percentage as a fraction, above 0 up to 1."""
    found = _SHARE.fullmatch(given.strip())
    share = float(found[1]) / 100.0 if found is not None else 0.0
    if not 0.0 < share <= 1.0:
        raise UsageError(option, expected="a percentage above 0% up to 100%, such as 10%", got=given)
    return share


def _percent(share: float) -> str:
    return f"{100.0 * share:.3g} %"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
