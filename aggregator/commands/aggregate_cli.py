"""The commands `protofleet aggregate` and `protofleet broker`: options in, progress lines and an exit code out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protofleet.aggregator.metrics.console import Drawn, log_styled
from protofleet.aggregator.server.broker import MAX_PAYLOAD_BYTES, EmbeddedBroker
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.settings import AggregateSettings, EmbeddedBrokerSettings, ServedSettings
from protofleet.contract.console import logs
from protofleet.contract.console.interrupt import Terminated, interruptible
from protofleet.contract.errors import LinkError
from protofleet.contract.files.json_output import is_stdout, write_json
from protofleet.contract.files.passwords import read_passwords
from protofleet.contract.mqtt.address import EVERYWHERE, LOOPBACK, parse_listen
from protofleet.contract.settings.command_line import command_of

__all__ = ["aggregate_command", "broker_command", "serve", "until_stopped"]

logger = logging.getLogger(__name__)

_OPEN_WARNING = (
    ": anyone who reaches it may publish and read: without --password-file this broker asks for none, and has "
    "neither ACL nor TLS; see deploy/ for one that has both"
)
_CLEAR_WARNING = (
    ": passwords and messages go over the network as they are, and who has a password may publish and read all: "
    "this broker has neither ACL nor TLS; see deploy/ for one that has both"
)


@command_of(AggregateSettings)
def aggregate_command(settings: AggregateSettings) -> int:
    """Run rounds: announce, receive, commit, merge. With --every or --when-new, until it is stopped."""
    farewell = f"the run goes on with the same --store {settings.store}"
    return serve(Service(settings), settings, farewell)


def serve(service: Service, settings: ServedSettings, farewell: str, **fields: Any) -> int:
    """Run a service until it ends or is stopped, its summary where it is to go; `fields` are of all it logs."""
    loud: dict[str, Any] = {"quiet": settings.quiet, "verbose": settings.verbose, "fleet": settings.fleet}
    logs.set_up(settings.log_format, text=Drawn(), **loud, **fields)

    def on_summary(content: dict[str, Any], finished: bool) -> None:
        if finished or not is_stdout(settings.json):
            write_json(settings.json, content)

    def run() -> None:
        service.run(lambda event: None, on_summary)

    return until_stopped(run, farewell)


@command_of(EmbeddedBrokerSettings)
def broker_command(settings: EmbeddedBrokerSettings) -> int:
    """Run the embedded MQTT broker."""
    logs.set_up(settings.log_format, quiet=settings.quiet, verbose=settings.verbose, text=Drawn())
    host, port = parse_listen(settings.listen)
    passwords = read_passwords(Path(settings.password_file), "--password-file") if settings.password_file else {}

    def run() -> None:
        with EmbeddedBroker(host, port, passwords) as running:
            further = " and every other address of this machine" if host in EVERYWHERE else ""
            logger.info(f"broker on {running.url}{further}, Ctrl-C ends it")
            if host not in LOOPBACK:
                log_styled(logger, logging.WARNING, "yellow", "warning", _CLEAR_WARNING if passwords else _OPEN_WARNING)
            about = f"process {running.pid}, messages up to {MAX_PAYLOAD_BYTES:,} bytes, nothing is kept on disk"
            logger.debug(about)
            while running.running:
                time.sleep(0.2)
            raise LinkError(f"broker on {running.url}", expected="it to go on", got="its process ended")

    code = until_stopped(run, "broker stopped")
    return 0 if code == 130 else code


def until_stopped(action: Callable[[], None], farewell: str) -> int:
    """Run `action`; Ctrl-C and SIGTERM end it with one line and the exit code they have by custom."""
    try:
        with interruptible(terminable=True):
            action()
    except Terminated:
        logger.info(f"terminated: {farewell}")
        return 143
    except KeyboardInterrupt:
        logger.info(f"interrupted: {farewell}")
        return 130
    return 0
