"""`python -m protofleet`: the same as the command."""
# ruff: noqa: E402  Ctrl-C is settled before anything else is loaded

from contract.interrupt import leave_at_once

leave_at_once()

import sys

from protofleet.cli import main

sys.exit(main())
