"""Our methods inside Flower: a strategy for its ServerApp, mods for its ClientApp (extra `flower`, docs/flower.md).

    strategy = MethodStrategy("ncm", classes=10, width=512)      # server: in `@app.main()`
    result = strategy.start(grid)

    app = ClientApp(mods=[method_mod(embed)])                    # client: `embed` gives features and labels
    app.train()(no_training)

Flower carries the messages, starts the processes and knows the nodes. Both sides compute with the same `Method` class
(`protofleet.contract.methods`) as a fleet of ours, so results are equal to the last bit. A round, in order:

1. `strategy.py` (server) asks. It sends our announcement, the method's hyper-parameters, and the global state so far.
2. `client.py` lets the method summarise the client's data: features of the client's own model (`samples.py`), or the
   images of a bundle. It replies with our contribution, encoded as on our own wire.
3. `strategy.py` checks, screens and merges the replies with the aggregator's own functions.
4. `learned.py` holds the result for both sides: prototypes, a head, answers.

`records.py` says how these messages are laid out in Flower's records.
"""

from __future__ import annotations

from protofleet.contract.extras import install_command

try:
    import flwr.clientapp
    import flwr.serverapp.strategy  # noqa: F401  # since 1.21
except ImportError as error:
    raise ImportError(
        f"protofleet.flower, expected flwr 1.22 or newer, got {error}, try {install_command('flower')}"
    ) from None

from protofleet.flower.client import bundle_mod, method_mod, no_training, received
from protofleet.flower.learned import Learned
from protofleet.flower.samples import Samples
from protofleet.flower.strategy import MethodStrategy

__all__ = ["Learned", "MethodStrategy", "Samples", "bundle_mod", "method_mod", "no_training", "received"]
