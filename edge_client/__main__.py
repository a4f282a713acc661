"""`python -m edge_client ID DESCRIPTOR`: the process that `protofleet client` turns into; see `process.py`."""
# ruff: noqa: E402  Ctrl-C is settled before anything else is loaded

from contract.interrupt import leave_at_once, let_through

leave_at_once()
let_through()

import sys

from edge_client.process import main

sys.exit(main(sys.argv[1:]))
