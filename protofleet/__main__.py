"""`python -m protofleet`: the same as the command."""

import sys

from protofleet.cli import main

sys.exit(main())
