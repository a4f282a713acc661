"""What this board was measured to take for its bundle, for the status message. See docs/hardware.md.

`protofleet profile F.bundle --measure --json STATE/profile.json` leaves a record in the state directory; its
`status_metrics` travel with every birth. A record of another bundle is left where it is and not sent: it would
describe another network.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from protofleet.contract.errors import UsageError
from protofleet.contract.wire.messages import MAX_ENTRIES, MAX_NAME

__all__ = ["PROFILE_FILE", "measured_metrics"]

PROFILE_FILE = "profile.json"
_RESERVED = 20  # the client's own figures, accuracy and drift among them
_FIRST = (  # where not all have room: what an operator compares with what the device does
    *("profile_train_step_ms", "profile_train_step_predicted_ms", "profile_train_step_peak_rss_bytes"),
    *("profile_memory_predicted_bytes", "profile_memory_at_most_bytes", "profile_memory_samples"),
    *("profile_inference_ms", "profile_inference_predicted_ms"),
)


def measured_metrics(state: Path, *bundles: bytes) -> dict[str, float]:
    """The figures of `STATE/profile.json` by name, as many as a status has room for.

    There are none where there is no such file, or where it is of none of these bundles.

    Args:
        bundles: sha256 of the device's bundle, and of those that it extends: what they compute is the same.

    Raises:
        UsageError: the file is there, but not a record of `profile --measure`.
    """
    path = state / PROFILE_FILE
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}", expected="JSON of profile --measure", got=error) from None
    record = table.get("measured", table) if isinstance(table, dict) else None
    if not isinstance(record, dict) or not isinstance(record.get("bundle"), dict):
        raise UsageError(f"{path}", expected="a record of profile --measure", got="another file", hint="removing it")
    if record["bundle"].get("sha256") not in [sha256.hex() for sha256 in bundles]:
        return {}
    metrics = record.get("status_metrics")
    if not isinstance(metrics, dict) or not all(_is_figure(name, value) for name, value in metrics.items()):
        raise UsageError(
            f"{path}: status_metrics", expected="finite numbers by name", got="others", hint="measuring anew"
        )
    names = sorted(metrics, key=lambda name: name not in _FIRST)[: MAX_ENTRIES - _RESERVED]
    return {name: float(metrics[name]) for name in names}


def _is_figure(name: object, value: object) -> bool:
    """Whether a status can tell it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(name, str) and 1 <= len(name) <= MAX_NAME and is_number
