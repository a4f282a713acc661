"""`python -m protofleet.edge_client ID DESCRIPTOR`: the process that `protofleet client` turns into; see
`process.py`."""
# ruff: noqa: E402  Ctrl-C is decided before anything else is loaded

from protofleet.contract.console.interrupt import leave_at_once, let_through

leave_at_once()
let_through()

import sys

from protofleet.edge_client.run.process import main

sys.exit(main(sys.argv[1:]))
