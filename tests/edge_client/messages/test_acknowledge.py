"""A receipt is in the journal before the broker hears that the device has it: as the broker saw it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from broker_log import Witness
from edge_peer import FLEET, Peer
from edge_samples import fashion

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.wire import topics

DOWN, CLIENT = topics.down(FLEET, "pi-1"), f"pf-{FLEET}-pi-1"
REFUSES = "CREATE TRIGGER refuses BEFORE UPDATE ON contributions BEGIN SELECT RAISE(ABORT, 'a disk that refuses'); END"


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    made = Witness(tmp_path / "m")
    made.start()
    yield made
    made.stop()


def test_a_receipt_that_the_journal_does_not_take_is_not_acknowledged(
    witness: Witness, mnist_like_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    path = mnist_like_bundle()
    bundle = read_bundle(path)
    data = fashion(bundle, 60, (0, 3, 8))
    np.savez(tmp_path / "d.npz", x=data.x, y=data.y)
    words = ["client", "--until-finished", "--broker", witness.url, "--bundle", path, "--id", "pi-1"]
    words += ["--data", tmp_path / "d.npz", "--state", tmp_path / "state"]
    command = [sys.executable, "-m", "protofleet", *map(str, words)]
    journal = tmp_path / "state" / "journal.sqlite"
    with Peer(witness.url, bundle) as peer:
        client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        peer.announce(1)
        peer.contribution(1)
        with sqlite3.connect(journal) as db:
            db.execute(REFUSES)
        db.close()
        peer.answer(1)
        client.communicate(timeout=30)
        assert client.returncode != 0
        ((at, packet),) = witness.delivered(CLIENT, DOWN)
        time.sleep(0.3)
        assert witness.acknowledged(CLIENT, packet, after=at) is None

        with sqlite3.connect(journal) as db:
            db.execute("DROP TRIGGER refuses")
        db.close()
        client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        peer.contribution(1)  # it still has it, and sends it again
        peer.answer(1, status="duplicate")
        peer.announce(1, phase="finished")
        assert "round 1 (fedproto): duplicate" in client.communicate(timeout=30)[1]
        assert client.returncode == 0
        (*_, (at, packet)) = witness.delivered(CLIENT, DOWN)
        assert witness.acknowledged(CLIENT, packet, after=at) is not None
