"""What Mosquitto writes down of each packet: the one witness that is neither client nor aggregator."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from brokers import Mosquitto, require_mosquitto, wait_for_port


class Witness(Mosquitto):
    """Mosquitto with its log of packets in `lines`."""

    def __init__(self, folder: Path) -> None:
        require_mosquitto()
        super().__init__(folder, "log_dest stderr\nlog_type all\n")
        self._log = folder / "packets.log"

    def start(self) -> None:
        """Its standard error is the log: as another user it may not reach the folder, and it does not buffer this."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(["mosquitto", "-c", str(self._config)], stdout=log, stderr=log)
        wait_for_port(self.port, self._process)

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def delivered(self, client: str, topic: str) -> list[tuple[int, int]]:
        """(line, packet id) of each message of `topic` that was sent to a client whose id begins so."""
        pattern = re.compile(rf"Sending PUBLISH to {client}\S* \(d\d, q1, r\d, m(\d+), '{re.escape(topic)}'")
        return [(at, int(m[1])) for at, line in enumerate(self.lines) if (m := pattern.search(line))]

    def acknowledged(self, client: str, packet: int, *, after: int) -> int | None:
        """The line on which the client acknowledged that packet; None when it has not."""
        pattern = re.compile(rf"Received PUBACK from {client}\S* \(Mid: {packet}, ")
        return next((at for at, line in enumerate(self.lines) if at > after and pattern.search(line)), None)

    def published(self, client: str, topic: str) -> int | None:
        """The line on which a client first published to `topic`."""
        pattern = re.compile(rf"Received PUBLISH from {client}\S* \(.*'{re.escape(topic)}'")
        return next((at for at, line in enumerate(self.lines) if pattern.search(line)), None)
