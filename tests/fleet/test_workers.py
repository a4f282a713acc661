"""Workers, leader, PostgreSQL and broker killed once each, a leader stopped: nothing is lost, doubled or hung.

And a worker that was stopped while another with other settings began to lead.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aggregator_samples import bundle_file, means
from aggregator_server_samples import wait
from brokers import Mosquitto, require_mosquitto
from commands import ROOT
from postgres_server import need_postgres
from talker import Talker

from protofleet.aggregator.store.durable_store import DurableStore

pytestmark = pytest.mark.slow


def killed(*more: str) -> str:
    """What is said of one kill of each kind."""
    need_postgres()
    require_mosquitto()
    command = [sys.executable, "-m", "benchmarks.kills.worker_kills", "--runs", "5", "--devices", "5", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 hung" in done.stdout
    return done.stdout


def test_whatever_is_killed_the_sums_are_those_of_one_aggregator() -> None:
    said = killed()
    assert "0 doubled, 0 other bytes" in said
    assert "0 lost, 0 rejected, 0 sums unlike one aggregator's" in said


def test_whatever_is_killed_sums_that_stand_are_those_of_one_aggregator() -> None:
    said = killed("--standing")
    assert "5 totals compared, 0 unlike one aggregator's" in said
    assert "0 lost, 0 other bytes, 0 rejected, 0 overtaken" in said


def test_a_worker_that_slept_takes_nothing_by_the_settings_of_before(tmp_path: Path) -> None:
    """It was stopped while the leader was killed and another with a limit of 7 samples began to lead: what the broker
    has kept for it is more than that, and it would have taken it."""
    server = need_postgres()
    require_mosquitto()
    place, bundle, broker = server.new_place(), tmp_path / "f.bundle", Mosquitto(tmp_path / "broker")
    sha256 = bundle_file(bundle)
    broker.start()
    processes, talkers = dict[str, subprocess.Popen[bytes]](), list[Talker]()

    def log(name: str) -> str:
        return (tmp_path / name).read_text()

    def start(name: str, *more: object) -> None:
        words = ["aggregate", "--worker", "--bundle", bundle, "--broker", broker.url, "--fleet", "slept"]
        words += ["--store", place, "--no-calibrate", *more]
        with open(tmp_path / name, "wb") as out:
            command = [sys.executable, "-m", "protofleet", *map(str, words)]
            processes[name] = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
        wait(lambda: "connected to" in log(name))

    try:
        start("leader", "--min-clients", 7)
        start("sleeper", "--min-clients", 7)
        talkers += [Talker(broker.url, "slept", f"d{i}", lambda a, i=i: means(i)) for i in range(6)]
        processes["sleeper"].send_signal(signal.SIGSTOP)
        processes["leader"].kill()
        processes["leader"].wait()
        start("newer", "--min-clients", 6, "--max-samples", 7)
        for talker in talkers:
            talker.start()
        wait(lambda: all(t.sent for t in talkers) and any(t.receipts for t in talkers))
        assert not all(t.receipts for t in talkers)  # some wait for the one that sleeps
        processes["sleeper"].send_signal(signal.SIGCONT)
        assert processes["sleeper"].wait(timeout=60) == 2
        assert "--worker, expected the options of the process that leads, got others" in log("sleeper")
        wait(lambda: all(t.receipts for t in talkers))
        assert {said for t in talkers for (said, *_) in t.receipts.values()} == {"rejected"}
        processes["newer"].kill()
        processes["newer"].wait()
        with DurableStore(place, sha256, "slept") as store:
            assert [record.uplink_bytes for record in store.rounds()] == [{}]
    finally:
        for talker in talkers:
            talker.stop()
        for process in processes.values():
            process.kill()
            process.wait()
        broker.stop()
