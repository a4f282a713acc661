"""The lab on Ray, on this machine alone: the same bits, loopback only, nothing sent home, nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lab_tasks
import psutil
import pytest

from protofleet.contract.errors import UsageError, WorkerError
from protofleet.contract.extras import install_command
from protofleet.lab.workers.engines import open_workers
from protofleet.lab.workers.workers import OneProcess, Workers, in_order
from tests.lab.workers.test_workers import _records

with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray")


def _family() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    places = set(Path(tempfile.gettempdir()).glob("protofleet-*"))
    before, terminated = {each.pid for each in _family()}, signal.getsignal(signal.SIGTERM)
    with open_workers("ray", 2) as workers:
        assert signal.getsignal(signal.SIGTERM) == terminated
        yield workers
    assert {each.pid for each in _family()} <= before
    assert set(Path(tempfile.gettempdir()).glob("protofleet-*")) == places
    assert "RAY_USAGE_STATS_ENABLED" not in os.environ


@with_ray
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedproto", "fedhkd-averaged", "fednh", "scaffold"])
def test_ray_gives_what_one_process_gives(method: str, two: Workers) -> None:
    alone = [record.as_json() for record in _records(method, OneProcess())]
    assert [record.as_json() for record in _records(method, two)] == alone


@with_ray
@pytest.mark.slow
def test_a_killed_workers_task_is_computed_again(
    two: Workers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with two.at_site(tmp_path) as at:
        assert list(in_order(at, lab_tasks.die_once, None, range(9))) == [n * n for n in range(9)]
    assert (tmp_path / "died").exists()
    assert not capfd.readouterr().out


@with_ray
@pytest.mark.slow
def test_it_hears_and_speaks_on_the_loopback_address_alone(two: Workers) -> None:
    with two.at_site(None) as at:
        list(in_order(at, lab_tasks.echo, None, range(4)))
    ends = [end for each in _family() for link in each.net_connections("inet") for end in (link.laddr, link.raddr)]
    assert len(ends) > 10
    assert {end.ip for end in ends if end} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    ours = [each for each in _family() if each.name() in ("gcs_server", "raylet")]
    assert {each.name() for each in ours} == {"gcs_server", "raylet"}
    assert {each.environ().get("RAY_USAGE_STATS_ENABLED") for each in ours} == {"0"}


def test_without_ray_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with (
        pytest.raises(
            UsageError, match=re.escape(f"--engine ray, expected Ray, got none installed, try {install_command('ray')}")
        ),
        open_workers("ray", 2),
    ):
        pass


@with_ray
@pytest.mark.slow
@pytest.mark.parametrize("answer", [None, b"220 mail.example\r\n", b""])
def test_an_address_where_no_ray_answers_is_one_line(answer: bytes | None) -> None:
    """Nobody there; somebody who speaks otherwise; somebody who closes at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if answer is None:
            server.close()
        else:
            import threading

            def serve() -> None:
                link, _ = server.accept()
                link.sendall(answer)
                link.close()

            threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(WorkerError, match=rf"--address {address}, expected a Ray cluster that answers"):  # noqa: SIM117
            with open_workers("ray", 2, address=address):
                pass


@with_ray
@pytest.mark.slow
def test_an_address_is_host_and_port() -> None:
    with (
        pytest.raises(UsageError, match="--address, expected HOST:PORT, got nowhere"),
        open_workers("ray", address="nowhere"),
    ):
        pass
