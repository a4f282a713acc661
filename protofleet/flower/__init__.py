"""Our methods inside Flower: a strategy for its ServerApp, mods for its ClientApp (extra `flower`, docs/flower.md).

    strategy = MethodStrategy("ncm", classes=10, width=512)      # server: in `@app.main()`
    result = strategy.start(grid)

    app = ClientApp(mods=[method_mod(embed)])                    # client: `embed` gives features and labels
    app.train()(no_training)

Flower carries the messages, starts the processes and knows the nodes; what is computed on either side is the same
class over `contract.methods.Method` as on a fleet of ours, so results are equal to the last bit. In order:

1. `strategy.py` (server) asks: our announcement, the method's hyper-parameters, and the global state so far;
2. `client.py` lets the method summarise what the client has, features of a model of its own (`samples.py`) or the
   images of a bundle, and answers with our contribution, encoded as on our own wire;
3. `strategy.py` checks, screens and merges the replies with the aggregator's own functions;
4. `learned.py` is what came of it, for either side: prototypes, a head, answers.

`records.py` is how each of these lies in Flower's records.
"""

from __future__ import annotations

from contract.extras import install_command

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
