"""`python -m protofleet`: the same as the command."""
# ruff: noqa: E402  Ctrl-C is decided before anything else is loaded

import signal
import sys

from protofleet.contract.console.interrupt import hold_back, leave_at_once

leave_at_once()
if sys.argv[1:2] == ["client"]:
    hold_back(signal.SIGUSR1)  # until its process answers it

from protofleet.cli import main

sys.exit(main())
