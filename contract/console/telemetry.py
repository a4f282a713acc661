"""Reports that other libraries send by themselves, switched off: only Protofleet's own messages may leave a device.

- ONNX Runtime's official builds collect events. From the moment the library loads, a thread keeps a device id and a
  queue in `~/.cache/Microsoft`, and sends them to a collector.
- Flower's and Hugging Face's packages can report their use.

An environment variable switches each of them off. It must be set before the library loads. So the package `contract`,
which every room imports first, sets them all; child processes inherit them. docs/decisions/070 has the whole table.
"""

from __future__ import annotations

import os
import sys

__all__ = ["VARIABLES", "loaded_before", "switch_off"]

VARIABLES = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime: no uploader, no events, no device id
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets: a request for each use of one of its own modules
    "FLWR_TELEMETRY_ENABLED": "0",  # flwr_datasets
    "DO_NOT_TRACK": "1",  # whoever follows donottrack.sh
}
_READ_BY = {
    "ORT_DISABLE_TELEMETRY": "onnxruntime",
    "HF_HUB_DISABLE_TELEMETRY": "huggingface_hub",
    "HF_UPDATE_DOWNLOAD_COUNTS": "datasets",
    "FLWR_TELEMETRY_ENABLED": "flwr_datasets",
}
_loaded_before: set[str] = set()


def switch_off() -> None:
    """Set every variable, whatever it was; remember the libraries that had already read another value."""
    for name, value in VARIABLES.items():
        library = _READ_BY.get(name)
        if library in sys.modules and os.environ.get(name) != value:
            _loaded_before.add(library)
        os.environ[name] = value


def loaded_before(library: str) -> bool:
    """Whether `library` was imported before Protofleet without its telemetry switched off."""
    return library in _loaded_before
