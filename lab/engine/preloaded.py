"""What the fork server loads, once for all workers: importing this module is all of it.

Making torch's first optimizer loads its compiler, for more than a second; a worker that is forked afterwards has it.
"""

from __future__ import annotations

import lab.engine.experiment  # noqa: F401
from export.torch_cache import load_dynamo

load_dynamo()
