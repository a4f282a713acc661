"""`protofleet client` as a real process over real brokers, against a peer that misbehaves when told to.

By default a test has one broker, the embedded one or Mosquitto; those of the embedded one are repeated by slow tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brokers import Proxy, TestBroker, free_port, make_broker
from edge_peer import FLEET, Peer
from edge_samples import fashion

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.wire import topics
from protofleet.contract.wire.chunks import bitmap
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Chunk, Contribution, Status
from protofleet.edge_client.hardware.process_metrics import board_name

OWN = (0, 3, 8)


@pytest.fixture(scope="module")
def path(mnist_like_bundle: Callable[..., Path]) -> Path:
    return mnist_like_bundle()


@pytest.fixture(scope="module")
def bundle(path: Path) -> Bundle:
    return read_bundle(path)


@pytest.fixture(scope="module")
def files(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Training and test images of one device, as .npz."""
    folder = tmp_path_factory.mktemp("data")
    for name, purpose, count, classes in (("train", "train", 60, OWN), ("test", "test", 40, tuple(range(10)))):
        data = fashion(bundle, count, classes, purpose=purpose)
        np.savez(folder / f"{name}.npz", x=data.x, y=data.y)
    return folder / "train.npz", folder / "test.npz"


@pytest.fixture(params=["embedded", pytest.param("mosquitto", marks=pytest.mark.slow)])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker(request.param, tmp_path)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker("mosquitto", tmp_path)
    found.start()
    yield found
    found.stop()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(path: Path, files: tuple[Path, Path], tmp_path: Path) -> Iterator[Start]:
    """`start(url, **options)`: a client process with its state in tmp_path/state unless told otherwise."""
    running: list[subprocess.Popen[str]] = []

    def run(url: str, **options: object) -> subprocess.Popen[str]:
        prefix, stays = options.pop("prefix", []), options.pop("stays", False)
        given = {"bundle": path, "broker": url, "id": "pi-1", "data": files[0], "state": tmp_path / "state", **options}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        words += [] if stays else ["--until-finished"]
        command = [*prefix, sys.executable, "-m", "protofleet", "client", *words]  # type: ignore[misc]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], code: int, timeout_s: float = 60.0) -> str:
    """What a process wrote to standard error, once it has ended with this exit code."""
    said = process.communicate(timeout=timeout_s)[1]
    assert process.returncode == code, said
    assert "Traceback" not in said
    return said


def history(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "state" / "history.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def rounds_done(tmp_path: Path) -> int:
    journal = tmp_path / "state" / "journal.sqlite"
    if not journal.exists():
        return 0
    try:
        rows = sqlite3.connect(f"file:{journal}?mode=ro", uri=True).execute("SELECT count(*) FROM rounds").fetchone()
    except sqlite3.OperationalError:
        return 0
    return int(rows[0])


def finish(peer: Peer, number: int, method: str = "fedproto") -> None:
    peer.announce(number, method, "finished")


def test_a_run_from_birth_to_death(
    broker: TestBroker, bundle: Bundle, start: Start, files: tuple[Path, Path], tmp_path: Path
) -> None:
    with Peer(broker.url, bundle) as peer:
        client = start(broker.url, test=files[1], json=tmp_path / "summary.json")
        birth = peer.status(online=True)
        assert (birth.boot, "onnxruntime" in birth.versions) == (1, True)
        assert 20e6 < birth.metrics["rss_bytes"] < 56e6  # a device that waits: docs/figures.md
        assert birth.metrics["peak_rss_bytes"] < 85e6  # while it starts
        for number in (1, 2):
            peer.announce(number)
            sent = peer.contribution(number)
            assert sent.body.classes.tolist() == list(OWN)
            peer.answer(number)
            peer.give(number, sent)
            peer.announce(number, phase="closed")
        peer.announce(3, "ffc", encoding="f64", limit_bytes=20_000)
        gram = peer.contribution(3)
        assert gram.triangle is not None
        assert max(len(payload) for payload in peer.uplink) <= 20_000
        peer.answer(3, "ffc")
        peer.give(3, gram, head=True)
        finish(peer, 3, "ffc")
        said = ended(client, 0)
        peer.status(online=False)
    lines = history(tmp_path)
    assert [(line["round"], line["method"], line["outcome"]) for line in lines] == [
        (1, "fedproto", "committed"),
        (2, "fedproto", "committed"),
        (3, "ffc", "committed"),
    ]
    assert [line["global_version"] for line in lines] == [1, 2, 3]
    for line in lines[:2]:
        assert line["loss"] > 0  # type: ignore[operator]
        assert line["step_ms"] > 0  # type: ignore[operator]
        assert line["uplink_bytes"] == line["payload_bytes"]
    assert lines[2]["uplink_bytes"] > lines[2]["payload_bytes"]  # type: ignore[operator]
    assert set(lines[2]["accuracy"]["own_classes"]) >= {"prototype", "head", "linear"}  # type: ignore[index]
    assert np.array(lines[2]["confusion"]["linear"]).sum() == 40  # type: ignore[index]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["contributions"] == {
        "sent": 3, "committed": 3, "duplicate": 0, "late": 0, "rejected": 0, "pending": 0,
    }  # fmt: skip
    assert 40e6 < summary["peak_rss_bytes"] < 120e6  # docs/figures.md
    assert "round 2 (fedproto): committed" in said


def test_nonsense_is_counted_and_skipped(broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path) -> None:
    with Peer(broker.url, bundle) as peer:
        client = start(broker.url)
        peer.status(online=True)
        junk = (b"\xff\x00garbage", b"", encode(Status(True, b"instance", 1)), b"\xa0")
        for topic in (topics.round_(FLEET), topics.down(FLEET, "pi-1"), topics.global_part(FLEET, 0)):  # 3 × 3 counted
            for payload in junk:
                peer.publish(topic, payload)
        other = Peer.__new__(Peer)
        other.run, other.version, other.publish = peer.run, 4, peer.publish  # type: ignore[method-assign]
        peer.announce(1)
        sent = peer.contribution(1)
        narrow = type(sent)(sent.run, 1, sent.method, sent.bundle, _narrow(sent), sent.counts)
        Peer.give(other, 1, narrow)  # prototypes of another width, as of another fleet
        peer.answer(1)
        peer.announce(1, phase="finished")
        said = ended(client, 0)
    assert said.count("skipped a message on") == 10
    assert said.count("committed") == 2


def test_without_a_receipt_the_same_bytes_come_again(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url)
        peer.announce(1)
        for _ in range(2):  # the first receipt is lost; the second contribution comes by itself
            peer.contribution(1, timeout_s=30)
        assert peer.uplink[0] == peer.uplink[1]
        peer.answer(1, status="duplicate")
        peer.announce(1, phase="finished")
        assert "round 1 (fedproto): duplicate" in ended(client, 0)


def _narrow(sent: object) -> object:
    from protofleet.contract.wire.messages import ClassRows

    return ClassRows(sent.body.classes, sent.body.rows[:, :7])  # type: ignore[attr-defined]


def test_only_the_chunks_that_are_asked_for_come_again(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url)
        peer.announce(1, "ffc", limit_bytes=10_000)
        peer.contribution(1)
        chunks = [decode(payload) for payload in peer.uplink]
        assert all(isinstance(chunk, Chunk) for chunk in chunks)
        peer.uplink.clear()
        peer.answer(1, "ffc", "need-chunks", missing=bitmap({0, 2}, len(chunks)))
        wait_for(lambda: peer.receive() is not None or len(peer.uplink) == 2)
        wait_for(lambda: peer.receive() is None)
        assert [decode(payload).index for payload in peer.uplink] == [0, 2]  # type: ignore[union-attr]
        peer.answer(1, "ffc", "duplicate")
        finish(peer, 1, "ffc")
        assert "round 1 (ffc): duplicate" in ended(client, 0)


@pytest.mark.parametrize("moment", ["training", "waiting"])
def test_kill_9_resumes_with_weights_round_and_outbox(
    mosquitto: TestBroker, bundle: Bundle, start: Start, tmp_path: Path, moment: str
) -> None:
    """Killed in round 2, in the middle of training or with the receipt outstanding, against a device left alone."""
    sent = {}
    for name, killed in (("alone", False), ("killed", True)):
        with Peer(mosquitto.url, bundle) as peer:
            peer.run = b"same"  # seeds come from (device, run, round)
            client = start(mosquitto.url, state=tmp_path / name)
            for number in (1, 2):
                peer.announce(number)
                if killed and number == 2:
                    if moment == "waiting":
                        sent["first"] = peer.contribution(2)
                    else:
                        time.sleep(0.15)
                    client.kill()
                    ended(client, -signal.SIGKILL)
                    client = start(mosquitto.url, state=tmp_path / name)
                sent[name] = peer.contribution(number)
                peer.answer(number)
                peer.give(number, sent[name])
            finish(peer, 2)
            ended(client, 0)
            peer.publish(topics.global_part(FLEET, 0), b"", retain=True)  # the next pass begins this run anew
    assert encode(sent["alone"], "f64") == encode(sent["killed"], "f64")
    if moment == "waiting":
        assert encode(sent["first"]) == encode(sent["killed"])
    boots = [json.loads(line)["boot"] for line in (tmp_path / "killed" / "history.jsonl").read_text().splitlines()]
    assert boots[0] == 1
    assert len(boots) >= 2


def test_a_broker_that_dies_and_forgets_loses_nothing(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    with Peer(broker.url, bundle) as peer:
        client = start(broker.url)
        peer.status(online=True)
        peer.announce(1)
        wait_for(lambda: rounds_done(tmp_path) == 1)
        broker.kill()  # perhaps with the contribution in it
        time.sleep(0.5)
        broker.start()
        peer.announce(1)
        sent = peer.contribution(1)
        peer.answer(1)
        peer.give(1, sent)
        finish(peer, 1)
        said = ended(client, 0)
    assert "connection lost" in said
    assert history(tmp_path)[0]["outcome"] == "committed"


@pytest.mark.parametrize("client_only", [False, True])
def test_a_round_goes_on_after_every_cut(broker: TestBroker, bundle: Bundle, start: Start, client_only: bool) -> None:
    """A client that said "connected" and heard nothing more: one cut before each thing that it waits for."""
    proxy = Proxy(broker.url)
    with Peer(broker.url, bundle) as peer:
        client = start(proxy.url)
        peer.status(online=True)
        proxy.cut(client_only=client_only)
        peer.announce(1)
        sent = peer.contribution(1)
        proxy.cut(client_only=client_only)
        peer.answer(1)
        peer.give(1, sent)
        proxy.cut(client_only=client_only)
        finish(peer, 1)
        while client.poll() is None:  # without the receipt it sends again, and is answered again
            if isinstance(peer.receive(0.2), Contribution):
                peer.answer(1)
        ended(client, 0)
    assert proxy.connections >= 3
    proxy.close()


@pytest.mark.parametrize("is_clone", [False, True], ids=["another state", "a copy of its state"])
def test_of_two_clients_with_one_id_the_first_stays(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path, is_clone: bool
) -> None:
    with Peer(broker.url, bundle) as peer:
        first = start(broker.url, state=tmp_path / "first")
        instance = peer.status(online=True).instance
        if is_clone:
            shutil.copytree(tmp_path / "first", tmp_path / "second")
        said = ended(start(broker.url, state=tmp_path / "second"), 2)  # a code that no unit starts again
        assert "error: another process runs as device pi-1, expected one process for each id" in said
        assert instance.hex() in said
        assert "Traceback" not in said
        while peer.statuses[-1].rival is None:
            peer.receive()
        told = peer.statuses[-1]  # and what is retained
        assert told.instance == instance
        assert told.rival is not None
        assert told.rival.instance in {status.instance for status in peer.statuses} - {instance}
        peer.announce(1)
        sent = peer.contribution(1)
        peer.answer(1)
        peer.give(1, sent)
        finish(peer, 1)
        ended(first, 0)


def test_nobody_waits_for_a_process_that_was_killed(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        first = start(mosquitto.url)
        born = peer.status(online=True)
        first.kill()
        first.wait()
        peer.status(online=False)
        peer.publish(topics.status(FLEET, "pi-1"), encode(replace(born, instance=b"of-a-cut")), retain=True)
        start(mosquitto.url)  # what stands there is the birth of somebody whose will was never published
        while peer.statuses[-1].instance in (born.instance, b"of-a-cut") or not peer.statuses[-1].online:
            peer.receive()
        assert peer.statuses[-1].boot == 2


def test_a_waiting_client_says_what_it_waits_for_once(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    said: list[str] = []
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url)

        def hears(waits_for: str) -> None:
            """Read on until it says so, or ends."""
            assert client.stderr is not None
            for line in client.stderr:
                said.append(line.rstrip().removeprefix("pi-1: "))
                if said[-1] == waits_for:
                    return

        hears("waiting for an aggregator: no round has been announced")
        peer.announce(1)
        sent = peer.contribution(1)
        hears("waiting for the receipt of round 1 (fedproto)")
        peer.answer(1)
        hears("round 1 (fedproto) is open and done here: waiting for the next round")
        peer.give(1, sent)
        peer.announce(1, phase="closed")
        hears("waiting for round 2 to open")
        time.sleep(1.5)  # time enough to say it again
        peer.announce(2, fraction=1e-9, seed=1)
        hears("round 2 (fedproto) is open, this device was not sampled: waiting for the next round")
        finish(peer, 2)
        hears("")
        assert client.wait(30) == 0, said
    assert [line for line in said if "waiting" in line] == [
        "waiting for an aggregator: no round has been announced",
        "waiting for the receipt of round 1 (fedproto)",
        "round 1 (fedproto) is open and done here: waiting for the next round",
        "waiting for round 2 to open",
        "round 2 (fedproto) is open, this device was not sampled: waiting for the next round",
    ]


def test_a_refusal_of_other_bytes_under_its_key_does_not_end_a_contribution(
    mosquitto: TestBroker, bundle: Bundle, start: Start
) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url)
        peer.announce(1)
        peer.contribution(1)
        peer.answer(1, status="rejected", reason="noise", digest=bytes(8))
        peer.contribution(1, timeout_s=30)  # it comes again, as without an answer
        peer.answer(1, status="rejected", reason="yours", digest=hashlib.sha256(peer.uplink[0]).digest()[:8])
        finish(peer, 1)
        said = ended(client, 0)
    assert "other bytes than ours were answered: rejected noise" in said
    assert "round 1 (fedproto): rejected (yours)" in said


def test_a_client_answers_a_death_in_its_name_with_a_birth(broker: TestBroker, bundle: Bundle, start: Start) -> None:
    """So an aggregator that has heard nothing of it through a whole deadline learns that it is there."""
    with Peer(broker.url, bundle) as peer:
        start(broker.url)
        born = peer.status(online=True)
        peer.publish(topics.status(FLEET, "pi-1"), encode(Status(False, born.instance, 0)), retain=True)
        peer.status(online=False)
        assert peer.status(online=True).instance == born.instance


def test_a_smaller_limit_after_a_restart_strands_nothing(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        start(mosquitto.url)
        peer.announce(1, limit_bytes=60_000)
        whole = peer.contribution(1)
        assert len(peer.uplink) == 1
        peer.uplink.clear()
        peer.announce(1, limit_bytes=1_024)
        again = peer.contribution(1)
        assert encode(again) == encode(whole)
        assert len(peer.uplink) > 1
        assert max(map(len, peer.uplink)) <= 1_024


def test_the_same_state_directory_twice_is_refused(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        start(mosquitto.url)
        peer.status(online=True)
        assert "got another process that runs on it, try stopping that one" in ended(start(mosquitto.url), 1)


def test_another_bundle_is_refused(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        peer.announce(1, bundle=b"\x01" * 32)
        said = ended(start(mosquitto.url), 2)
        assert "error: the fleet runs another bundle, expected sha256 010101010101…, got" in said


def test_a_finished_run_of_others_is_waited_out(mosquitto: TestBroker, bundle: Bundle, start: Start) -> None:
    with Peer(mosquitto.url, bundle) as old:
        finish(old, 7)
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url)
        peer.status(online=True)
        time.sleep(0.5)
        assert client.poll() is None
        peer.announce(1)
        sent = peer.contribution(1)
        peer.answer(1)
        peer.give(1, sent)
        finish(peer, 1)
        assert f"run {old.run.hex()} was over before this device came" in ended(client, 0)


def test_no_broker_is_one_line_after_the_patience(start: Start) -> None:
    began = time.monotonic()
    said = ended(start(f"mqtt://127.0.0.1:{free_port()}", patience=1), 1)
    assert "error: no broker at mqtt://127.0.0.1:" in said
    assert "within 1 s, expected an MQTT 5 broker, got" in said
    assert time.monotonic() - began < 120  # not the default patience of minutes; a busy machine starts slowly


def test_no_receipt_after_the_end_is_said_and_kept(
    mosquitto: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url, patience=2)
        peer.announce(1)
        peer.contribution(1)
        finish(peer, 1)
        said = ended(client, 1)
        assert "the run is over, contributions without a receipt: 1" in said
        assert said.count("waiting for the receipt of round 1 (fedproto)") == 1
        wait_for(lambda: peer.receive(0.3) is None)  # what it had sent again
        client = start(mosquitto.url, patience=10)
        peer.contribution(1)
        peer.answer(1, status="late")
        assert "round 1 (fedproto): late" in ended(client, 0)
    assert history(tmp_path)[0]["outcome"] == "late"


def test_sigusr1_ends_no_client_that_starts(path: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    """It means a look at the photos; from the command's first lines on it waits, also while the process is replaced."""
    words = [
        "--bundle",
        path,
        "--broker",
        "mqtt://127.0.0.1:1",
        "--id",
        "pi-1",
        "--data",
        files[0],
        "--patience",
        "0.5",
    ]
    command = [sys.executable, "-m", "protofleet", "client", *map(str, words), "--state", str(tmp_path / "state")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    told = 0
    while process.poll() is None:
        if told or _holds_back(process.pid, signal.SIGUSR1):
            told += process.poll() is None
            process.send_signal(signal.SIGUSR1)
    said = process.communicate()[1]
    assert process.returncode == 1, said
    assert "error: no broker at mqtt://127.0.0.1:1" in said
    assert told > 10


def test_sigusr1_to_all_of_its_processes_ends_none(path: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    """As `systemctl kill` sends it: the process that tries how much memory the bundle takes gets it, too."""
    words = ["--id", "pi-1", "--data", files[0], "--memory-limit", "2GB", "--broker", "mqtt://127.0.0.1:1"]
    words += ["--bundle", path, "--patience", "0.5", "--state", tmp_path / "state"]
    command = [sys.executable, "-m", "protofleet", "client", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    held = False
    while process.poll() is None:
        held = held or _holds_back(process.pid, signal.SIGUSR1)
        if held:
            os.killpg(process.pid, signal.SIGUSR1)
        time.sleep(0.01)
    said = process.communicate()[1]
    assert process.returncode == 1, said
    assert "error: no broker at mqtt://127.0.0.1:1" in said


def _holds_back(process: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_a_clean_goodbye(
    mosquitto: TestBroker, bundle: Bundle, start: Start, number: signal.Signals, code: int
) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        client = start(mosquitto.url)
        peer.status(online=True)
        client.send_signal(number)
        assert ended(client, code).splitlines()[-1] == f"pi-1: stopped by {number.name}, nothing is lost"
        gone = peer.status(online=False)
        assert (gone.profile, gone.versions) == (board_name(), {})


def test_a_full_disk_ends_the_round_but_loses_nothing(
    mosquitto: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    with Peer(mosquitto.url, bundle) as peer:
        peer.announce(1)
        client = start(mosquitto.url, prefix=["prlimit", "--fsize=400000"])  # the weights do not fit
        said = ended(client, 1)
        assert "expected a disk that takes it, got" in said.splitlines()[-1]
        assert rounds_done(tmp_path) == 0
        assert peer.uplink == []
        client = start(mosquitto.url)
        sent = peer.contribution(1)
        peer.answer(1)
        peer.give(1, sent)
        finish(peer, 1)
        ended(client, 0)
