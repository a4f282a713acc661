"""Devices of a simulated month in one process, which may be killed at any moment: see benchmarks/living/month.py.

    python -m benchmarks.living.worker LOOK_S LOGS

Each line on standard input is a job, as JSON; each line on standard output says what became of one. A device that is
woken is a real `Service`, as `protofleet client` runs it, in a thread of its own: bundle, photos, journal, link.

    {"do": "wake", "job": 7, "awake_s": 1.5, "settings": {…}}   run a device until so long after it has connected, 30 s
                      more while it fetches and tries a bundle; null for until told otherwise
    {"do": "sleep", "job": 7}                                   let it end, as a signal would
    {"do": "count", "job": 8}                                   bytes and segments so far, by fleet and device

Simulated here is the clock: a device looks for new photos every LOOK_S seconds, and not every ten minutes, and one that
was refused tries again as soon. Bytes are what the kernel counts for each connection (TCP_INFO).
"""

from __future__ import annotations

import faulthandler
import json
import logging
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protofleet.contract.errors import ProtofleetError
from protofleet.contract.mqtt import link as link_module
from protofleet.contract.mqtt.transport import Transport
from protofleet.edge_client.run import client
from protofleet.edge_client.run.service import Service
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.standing import generations

_CONNECTS_S, _BUSY_S = 10.0, 30.0
_BUSY = re.compile(r"is offered: fetching|is here: trying")
_ACKED_AT, _FIELDS = 120, "=QQII"  # of struct tcp_info: bytes acknowledged and received, segments out and in


class Traffic:
    """Bytes and segments of all connections of this process, by fleet and device."""

    def __init__(self) -> None:
        self._lock, self._ended, self._open = threading.Lock(), Counter[tuple[str, str]](), set[Any]()

    def opened(self, transport: Any) -> None:
        with self._lock:
            self._open.add(transport)

    def ended(self, transport: Any) -> None:
        with self._lock:
            if transport in self._open:
                self._open.discard(transport)
                self._ended.update(transport.counted())

    def told(self) -> dict[str, dict[str, int]]:
        """`bytes` and `segments`, both ways, by the client id without its instance."""
        with self._lock:
            total = self._ended.copy()
            for transport in self._open:
                total.update(transport.counted())
        found: dict[str, dict[str, int]] = {}
        for (owner, what), number in total.items():
            found.setdefault(owner, {})[what] = number
        return found


class Counted(Transport):
    """A connection of a device, and what went over it."""

    def __init__(self, core: Any, lock: Any, address: Any, client_id: str, **given: Any) -> None:
        super().__init__(core, lock, address, client_id, **given)
        self._owner = client_id.removeprefix("pf-").rpartition("-")[0]
        self._seen = (0, 0, 0, 0)

    def dial(self) -> None:
        super().dial()
        TRAFFIC.opened(self)

    def step(self, wake: socket.socket, timeout_s: float) -> None:
        super().step(wake, timeout_s)
        self._look()

    def hang_up(self, *, polite: bool) -> None:
        self._look()
        TRAFFIC.ended(self)
        super().hang_up(polite=polite)

    def _look(self) -> None:
        sock = self._client.socket()
        if sock is not None:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            self._seen = struct.unpack_from(_FIELDS, info, _ACKED_AT)

    def counted(self) -> dict[tuple[str, str], int]:
        sent, received, out, came = self._seen
        return {(self._owner, "bytes"): sent + received, (self._owner, "segments"): out + came}


TRAFFIC = Traffic()


class Lines(logging.Handler):
    """What one device of this process says: into its file, and to `tell`."""

    def __init__(self, logs: Path, fleet: str, device: str, tell: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self._of, self._file, self._tell = (fleet, device), logs / f"{fleet}-{device}.log", tell

    def emit(self, record: logging.LogRecord) -> None:
        if (getattr(record, "fleet", None), getattr(record, "device", None)) == self._of:
            self.write(record.getMessage())

    def write(self, line: str) -> None:
        with open(self._file, "a") as file:
            file.write(f"{line}\n")
        self._tell(line)


class Devices:
    """Those that are awake here."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._lock, self._awake = logs, threading.Lock(), dict[int, Service]()

    def wake(self, job: int, awake_s: float | None, settings: dict[str, Any]) -> None:
        service = Service(ClientSettings(**settings))
        with self._lock:
            self._awake[job] = service
        threading.Thread(target=self._run, args=(job, service, awake_s, settings), daemon=True).start()

    def sleep(self, job: int) -> None:
        with self._lock:
            service = self._awake.get(job)
        if service is not None:
            service.stop()

    def _run(self, job: int, service: Service, awake_s: float | None, settings: dict[str, Any]) -> None:
        now, ended = time.monotonic, threading.Event()
        sleeps_at = [float("inf") if awake_s is None else now() + awake_s + _CONNECTS_S]

        def say(line: str) -> None:
            if awake_s is not None and line.startswith("connected to"):
                sleeps_at[0] = now() + awake_s
            elif awake_s is not None and _BUSY.search(line):
                sleeps_at[0] = now() + _BUSY_S

        def sleep_in_time() -> None:
            while (left := sleeps_at[0] - now()) > 0:
                if ended.wait(min(left, 0.2)):
                    return
            service.stop()

        threading.Thread(target=sleep_in_time, daemon=True).start()
        failed, lines = "", Lines(self._logs, settings["fleet"], settings["id"], say)
        logging.getLogger("protofleet").addHandler(lines)
        try:
            service.run(lambda summary, ended: None)
        except ProtofleetError as error:
            failed = str(error)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        finally:
            logging.getLogger("protofleet").removeHandler(lines)
        if failed:
            lines.write(failed)
        ended.set()
        with self._lock:
            self._awake.pop(job)
        tell(job, failed=failed)


_telling = threading.Lock()


def tell(job: int, **told: object) -> None:
    with _telling:
        print(json.dumps({"job": job, **told}), flush=True)


def main() -> None:
    faulthandler.enable()
    logging.getLogger("protofleet").setLevel(logging.INFO)
    look_s, devices = float(sys.argv[1]), Devices(Path(sys.argv[2]))
    client._LOOK_S = generations.REFUSED_WAIT_S = look_s  # the simulated clock
    link_module.Transport = Counted  # type: ignore[misc]
    for line in sys.stdin:
        given = json.loads(line)
        what, job = given.pop("do"), given.pop("job")
        if what == "wake":
            devices.wake(job, **given)
        elif what == "sleep":
            devices.sleep(job)
        else:
            tell(job, traffic=TRAFFIC.told())


if __name__ == "__main__":
    main()
