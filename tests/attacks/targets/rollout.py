"""The record of roll-outs in a state directory, changed by somebody: it names nothing outside of that directory.

What the record says is removed, looked into and made runs on it; a file beside the state directory must outlive that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import msgspec

from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.sqlite import Database
from protofleet.contract.wire.messages import Status
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle
from protofleet.edge_client.rollout.rollout_file import FILE, KIND, RolloutFile, answering, bundle_file, read_rollouts
from tests.attacks.choices import Choices
from tests.attacks.damaged_sqlite import write_damaged
from tests.attacks.guard import scratch
from tests.attacks.promises import may_refuse

LONGEST_BYTES = 1024
OLD, NEW = bytes(range(32)), bytes(range(1, 33))


def run(data: bytes) -> None:
    choices = Choices(data)
    with scratch() as folder:
        state, beside = folder / "state", folder / "beside"
        for each in (state, beside / "images"):
            each.mkdir(parents=True)
        if choices.chance():
            _write_record(state / FILE, choices)
        else:
            write_damaged(state / FILE, good_record(), choices)
        for act in (lambda: read_rollouts(state), lambda: _inside(answering(state), state), lambda: _use(state)):
            may_refuse(act, StoreError, UsageError)
        assert (beside / "images").is_dir(), "something outside of the state directory was removed"
        assert sorted(path.name for path in folder.iterdir()) == ["beside", "state"]


def _inside(path: Path, state: Path) -> None:
    assert path.resolve().is_relative_to(state.resolve()), path


def _write_record(path: Path, choices: Choices) -> None:
    """A record of JSON that is nearly one."""
    json = bytearray(_good_json())
    for _ in range(1 + choices.below(4)):
        at, cut, put = choices.below(len(json) + 1), choices.below(80), choices.take(choices.below(80))
        json[at : at + cut] = put
    file = Database(path, KIND)
    with file.transaction() as db:
        db.execute("INSERT INTO rollouts VALUES (1, ?)", (bytes(json),))
    file.close()


def _use(state: Path) -> None:
    """What a client does with it."""
    with RolloutFile(state, make=True) as file:
        known = file.known
        for seat in (known.active, known.previous):
            if seat is not None:
                _inside(state / seat.directory, state)
                _inside(bundle_file(state, seat.sha256), state)
                file.drop_caches(seat)
                Status(True, bytes(8), 1, versions={"bundle": rollout_decisions.tag(seat)})
        file.tidy()
        may_refuse(lambda: rollout_decisions.instead(known, OLD.hex(), "fleet"), StoreError, UsageError)
        if known.active is not None and known.previous is not None:
            file.change(rollout_decisions.started)
            file.change(rollout_decisions.got_through)
            if file.known.probation is not None:  # a start too many was the end of it
                file.change(rollout_decisions.rolled_back, "a reason")


@functools.cache
def good_record() -> bytes:
    """A device that has gone over to another fleet's bundle, on probation."""
    with scratch() as folder:
        with RolloutFile(folder, make=True) as file:
            file.put(_good())
        return (folder / FILE).read_bytes()


def _good() -> rollout_decisions.Rollouts:
    old, new = (
        InstalledBundle(OLD.hex(), 1, "fleet"),
        InstalledBundle(NEW.hex(), 2, "pets", f"fleets/pets-{NEW.hex()[:8]}"),
    )
    failed = {"ab" * 32: rollout_decisions.Failure(3, "self-test", OLD.hex())}
    return rollout_decisions.Rollouts(
        "fleet", new, old, (OLD.hex(),), 1, failed, rollout_decisions.Probation(1, 0.5), 0.5
    )


@functools.cache
def _good_json() -> bytes:
    return msgspec.json.encode(_good())


def seeds() -> Iterable[bytes]:
    yield b"\1\0"
    for at in range(0, len(_good_json()), 25):
        yield bytes([1, 0, at % 256, 4, 9]) + b"../../x/y"
        yield bytes([0, 1, 0, 0, 8, 11, 0, at % 256, 3, 7]) + b'"/etc/"'
