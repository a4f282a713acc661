"""`python -m edge_client ID DESCRIPTOR`: the process that `protofleet client` turns into; see `process.py`."""

import sys

from edge_client.process import main

sys.exit(main(sys.argv[1:]))
