"""Loaded for all workers: the fork server imports this module once.

Torch's first optimizer loads its compiler, which takes more than a second. A worker that is forked afterwards has it.
"""

from __future__ import annotations

import protofleet.lab.engine.experiment  # noqa: F401
from protofleet.export.modules.torch_cache import load_dynamo

__all__: list[str] = []

load_dynamo()
