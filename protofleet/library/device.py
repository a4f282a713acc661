"""A device inside a program: what `protofleet client` does, on files or on arrays in memory."""

from __future__ import annotations

import os
from typing import Any

from numpy.typing import NDArray

from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.run.service import Service
from protofleet.edge_client.settings import ClientSettings

__all__ = ["Device"]

Source = str | os.PathLike[str]


class Device:
    """Takes part in one fleet.

    Args:
        bundle: the fleet's bundle.
        broker: `mqtt://host[:port]` or `mqtts://host[:port]`.
        id: the id of this device, unique in the fleet.
        data: a folder, `.csv`, `.npz` or `.parquet` as `protofleet client --data` takes it, or arrays in memory: images
            (N, H, W, c) uint8 and class numbers (N,).
        state: directory for weights, outbox and history. Created when absent, resumed otherwise.
        options: as `protofleet client` takes them: `fleet`, `test`, `hold_out`, `report_accuracy`,
            `tell_drift`, `activations`, `threads`, `memory_limit`, `micro_batch`, `patience`, `keepalive`, `ca`,
            `cert`, `key`, `trust`, `identity`, `token`, `rollout`, `policy`, `method`. One default differs from the
            command: the device ends when the run is finished, unless `until_finished=False`.

    Raises:
        ProtofleetError: an option is unknown or out of range.
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
        self._service = Service(read_settings(ClientSettings, given), arrays)

    def run(self) -> dict[str, Any]:
        """Take part until the run is finished (see `until_finished`), or `stop`; returns what `client --json` writes.

        Args:

        Raises:
            ProtofleetError: whatever ends the command. Nothing that was committed is lost.
        """
        return self._service.run(lambda content, finished: None)

    def stop(self) -> None:
        """End `run` after the current round. Any thread may call it. A new device on the same state continues."""
        self._service.stop()
