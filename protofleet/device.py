"""A device inside a program: what `protofleet client` does, on files or on arrays in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from edge_client.config import settle_config
from edge_client.service import Service

__all__ = ["Device"]

Source = str | os.PathLike[str]


class Device:
    """Takes part in one fleet.

    Args:
        bundle: the fleet's bundle.
        broker: `mqtt://host[:port]` or `mqtts://host[:port]`.
        id: of this device, its own in the fleet.
        data: a folder, `.csv`, `.npz` or `.parquet` as `protofleet client --data` takes it, or arrays in memory: images
            (N, H, W, c) uint8 and class numbers (N,).
        state: directory for weights, outbox and history; made when absent, resumed when not.
        options: as `protofleet client` takes them: `fleet`, `test`, `hold_out`, `report_accuracy`,
            `tell_drift`, `activations`, `threads`, `memory_limit`, `micro_batch`, `patience`, `keepalive`, `ca`,
            `cert`, `key`, `trust`, `identity`, `token`, `rollout`, `policy`, `method`. Other than the command, a device
            of a program ends with its run, unless told `until_finished=False`.

    Raises:
        ProtofleetError: an option that is none, or out of range.
    """

    def __init__(
        self,
        bundle: Source,
        *,
        broker: str,
        id: str,
        data: Source | tuple[NDArray[Any], NDArray[Any]],
        state: Source,
        **options: Any,
    ) -> None:
        arrays = data if isinstance(data, tuple) else None
        options = {"until_finished": True, **options}
        given = {"bundle": os.fspath(bundle), "broker": broker, "id": id, "state": os.fspath(state), **options}
        given["data"] = "" if isinstance(data, tuple) else os.fspath(data)
        self._service = Service(settle_config(None, given), arrays)

    def run(self, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """Take part until the run is finished (see `until_finished`), or `stop`; returns what `client --json` writes.

        Args:
            log: takes a line for a person now and then.

        Raises:
            ProtofleetError: as the command ends; nothing that was committed is lost.
        """
        return self._service.run(log, lambda content, finished: None)

    def stop(self) -> None:
        """End `run` from any thread, once the round under way is done. A new one on the same state goes on."""
        self._service.stop()
