"""Optional TensorBoard output: the rounds' numbers as scalars, with the installed writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from protofleet.contract.errors import UsageError
from protofleet.lab.engine.deployed import RoundRecord

__all__ = ["Board", "log_round", "open_board"]


class Board(Protocol):
    """The common interface of both writers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def close(self) -> None: ...


def open_board(folder: Path) -> Board:
    """A writer of event files into `folder`.

    Raises:
        UsageError: when neither tensorboardX nor tensorboard is installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise UsageError(
                "--tensorboard",
                expected="tensorboardX or tensorboard",
                got="neither",
                hint="pip install tensorboardX",
            ) from None
    writer: Board = SummaryWriter(str(folder))
    return writer


def log_round(board: Board, prefix: str, record: RoundRecord) -> None:
    """Write one round's numbers as scalars under `prefix/…`."""
    values: dict[str, float | None] = {"loss": record.loss, "uplink_bytes": record.uplink_bytes}
    for part, table in record.as_json().items():
        if isinstance(table, dict) and part != "closing_bytes":
            values |= {f"{part}/{way}": value for way, value in table.items() if not isinstance(value, list)}
    for tag, value in values.items():
        if value is not None:
            board.add_scalar(f"{prefix}/{tag}", float(value), record.round)
