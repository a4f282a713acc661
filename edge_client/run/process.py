"""The device's process: settings in, one device out, an exit code back.

It reads the bundle and the data, opens the state directory, restores the weights, and runs the client. It ends with one
of these exit codes:

    0      the run is finished, where the client was asked to end with it
    1, 2   a failure, or bad input; one line says what is wrong
    130    Ctrl-C
    143    SIGTERM

At a signal the death is published, and nothing is lost.

SIGUSR1 makes the device look at its photos. A signal that comes during the start waits until the device can look. A
service manager sends the signal to every process of its unit. The processes in which a bundle is tried inherit the
blocked signal, and never see it.

`become` replaces the present process by one that runs nothing but this. It has the same process id and the same
standard streams, but not the modules that parsed the command line. Typer, rich and pydantic take 12 MB that a small
board would carry for months (docs/decisions/021). The settings travel in an anonymous file, so that a broker's password
shows up nowhere.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from protofleet.contract.console import logs
from protofleet.contract.console.interrupt import Terminated, hold_back, interruptible
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.files.json_output import is_stdout, write_json
from protofleet.contract.printable import keep_printable
from protofleet.edge_client.settings import ClientSettings

if TYPE_CHECKING:
    from protofleet.edge_client.run.service import Service

__all__ = ["become", "main", "run"]

logger = logging.getLogger(__name__)


def become(settings: ClientSettings) -> NoReturn:
    """Replace this process by the device's; never returns."""
    descriptor = os.memfd_create("settings", 0)  # inherited, since no close-on-exec is asked for
    os.write(descriptor, msgspec.json.encode(settings))
    os.lseek(descriptor, 0, os.SEEK_SET)
    threads = str(settings.threads)
    environment = {
        "MALLOC_ARENA_MAX": "1",  # glibc would give each thread a heap of its own
        "MALLOC_MMAP_THRESHOLD_": "524288",  # fixed: glibc would raise it, and keep what training needed in its heap
        "OPENBLAS_NUM_THREADS": threads,  # numpy's BLAS would reserve a buffer for each core
        "OMP_NUM_THREADS": threads,
        **os.environ,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    hold_back()  # until the new process can answer Ctrl-C
    hold_back(signal.SIGUSR1)  # in all threads and processes of the new one; one thread asks for it
    same_path = [] if sys.path[:1] == [os.getcwd()] else ["-P"]  # import from where this process imported from
    os.execve(
        sys.executable,
        [sys.executable, *same_path, "-m", "protofleet.edge_client", settings.id, str(descriptor)],
        environment,
    )


def main(arguments: list[str]) -> int:
    """The process that `become` starts: `arguments` are the device id, for who looks at `ps`, and a descriptor."""
    keep_printable(sys.stdout, sys.stderr)
    with os.fdopen(int(arguments[1]), "rb") as file:
        settings = msgspec.json.decode(file.read(), type=ClientSettings)
    _load_modules()
    from protofleet.edge_client.hardware.process_metrics import own_this_process  # here: the command needs none of it

    own_this_process()
    try:
        return run(settings)
    except ProtofleetError as error:
        logs.report(error)
        return error.exit_code
    except MemoryError as error:
        logs.report(f"not enough memory ({error or 'Python says no more'})")
        return 1
    finally:
        hold_back(signal.SIGUSR1)  # at its end Python forgets our answer, and the signal would change the exit code


def run(settings: ClientSettings) -> int:
    """Run one device; returns 0 when its run is finished and it ends with it, 128 + n when signal n ended it.

    Raises:
        ProtofleetError: each with its exit code.
    """
    loud: dict[str, Any] = {"quiet": settings.quiet, "verbose": settings.verbose, "prefix": f"{settings.id}: "}
    logs.set_up(settings.log_format, **loud, fleet=settings.fleet, device=settings.id)
    _load_modules()
    try:
        with interruptible(terminable=True, once=True):  # safe at any instruction, as after kill -9
            _run(settings)
    except KeyboardInterrupt as stop:
        number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        logger.info(f"stopped by {number.name}, nothing is lost")
        return 128 + number
    return 0


def _load_modules() -> None:
    """Before signals raise: ONNX Runtime's extension makes an ImportError of whatever is raised while it loads."""
    importlib.import_module("protofleet.edge_client.run.client")
    importlib.import_module("protofleet.edge_client.device.device")


def _run(settings: ClientSettings) -> None:
    if settings.withdraw:
        from protofleet.edge_client.run.photo_work import say_what_stays
        from protofleet.edge_client.run.withdrawal import withdraw

        withdraw(settings)
        say_what_stays(Path(settings.state), "this device has withdrawn from its fleet")
        return
    if settings.remove_home_assistant:
        from protofleet.edge_client.home_assistant.removal import remove

        remove(settings)
        return
    from protofleet.edge_client.run.service import Service

    def on_summary(content: dict[str, Any], finished: bool) -> None:
        if finished or not is_stdout(settings.json):
            write_json(settings.json, content)

    service = Service(settings)
    signal.signal(signal.SIGUSR1, lambda number, frame: service.look())
    threading.Thread(target=_look_on_signal, args=(service,), name="looks", daemon=True).start()
    service.run(on_summary)


def _look_on_signal(service: Service) -> None:
    """Take SIGUSR1, which is blocked since the command began. A signal that came meanwhile is answered, too."""
    while True:
        signal.sigwait({signal.SIGUSR1})
        service.look()
