"""The compiled graphs of a bundle: made when they are needed, then kept or released.

A board makes its training session for a round and frees it afterwards, because it waits far longer than it trains. The
lab has hundreds of devices over one bundle in one process, so it keeps one session and shares it. A trainer holds only
the weights that were loaded last, and the bundle's own extractor is the same for all devices.

The features of that extractor are summed over devices. When it is made for the first time it computes the bundle's test
vectors. If they are not as expected, nothing may be summed.
"""

from __future__ import annotations

import threading

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.test_vectors import TOLERANCE, distance
from protofleet.contract.errors import BundleError
from protofleet.edge_client.hardware.process_metrics import rest_memory
from protofleet.edge_client.training.extractor import Extractor, GivenFeatures
from protofleet.edge_client.training.frozen_trunk import FrozenTrunk, TailExtractor, TrunkGraph
from protofleet.edge_client.training.onnx_session import Provider, Providers
from protofleet.edge_client.training.trainer import Trainer, Weights

__all__ = ["CompiledGraphs", "GivenGraphs"]


class CompiledGraphs:
    """Makes trainers and extractors for one bundle.

    Args:
        threads: within an operator.
        providers: where each runs; the CPU unless one was chosen.
        keep: hand out the same trainer, and the same extractor of the bundle's weights, every time.
        in_parts: train each batch in parts of the bundle's micro-batch.
        keeps_shared: keep the extractor of the bundle's weights alone, where it is used all the time.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int = 1,
        *,
        providers: Providers | None = None,
        keep: bool = False,
        in_parts: bool = False,
        keeps_shared: bool = False,
    ) -> None:
        self._keeps_shared, self._making = keep or keeps_shared, threading.Lock()
        self._in_parts = in_parts
        self._bundle, self._threads, self._keep = bundle, threads, keep
        self._providers = providers or Providers()
        self._unchecked = bundle.vectors
        self._trainer: Trainer | None = None
        self._shared: Extractor | None = None
        self._trunk: TrunkGraph | None = None

    def trainer(self) -> Trainer:
        """A trainer; load a state before fitting."""
        trainer = self._trainer or Trainer(self._bundle, self._threads, self._on("training"), in_parts=self._in_parts)
        self._trainer = trainer if self._keep else None
        self.rest()  # what only making a session needs: code that optimises graphs, above all
        return trainer

    def rest(self) -> None:
        """Give back what sessions that are gone have left, unless sessions are kept."""
        if not self._keep:
            rest_memory()

    def extractor(self, params: Weights) -> Extractor:
        """An extractor of these weights."""
        return Extractor(self._bundle, params, self._threads, self._on("own"))

    def shared_extractor(self) -> Extractor:
        """The extractor of the bundle's own weights, which every device of the fleet has; from any thread.

        Raises:
            BundleError: what it computes here is not what it computed where the bundle was exported.
        """
        with self._making:
            if self._shared is not None and self._unchecked is None:
                return self._shared
            self.rest()  # making a session takes more than running it: what was before is given back first
            shared = self._shared or self._made_shared()
            self._shared = shared if self._keeps_shared else None
            self.rest()
            self._check(shared)
            return shared

    def _made_shared(self) -> Extractor:
        bundle, gives_back = self._bundle, self._keeps_shared and not self._keep
        return Extractor(bundle, bundle.params, self._threads, self._on("shared"), gives_back=gives_back)

    def _check(self, shared: Extractor) -> None:
        """Once, the bundle's test vectors."""
        if self._unchecked is None:
            return
        error = distance(shared.features(self._unchecked.x), self._unchecked.z)
        if not error <= TOLERANCE:
            raise BundleError(
                "features.onnx on this processor",
                expected="the features of the bundle's test vectors",
                got=f"others, off by {error:.1g}, so nothing may be summed",
                hint="another version of onnxruntime",
            )
        self._unchecked = None

    def _on(self, use: str) -> Provider:
        return self._providers.of(getattr(self._providers.choice, use))

    def trunk(self) -> TrunkGraph:
        """The frozen trunk of a network whose tail is trained."""
        trunk = self._trunk or TrunkGraph(self._bundle, self._threads)
        self._trunk = trunk if self._keep else None
        return trunk

    def tail(self, params: Weights, trunk: FrozenTrunk) -> TailExtractor:
        """An extractor of these weights that goes on from what the trunk has made of a device's photos."""
        return TailExtractor(self._bundle, params, trunk, self._threads)


class GivenGraphs(CompiledGraphs):
    """The graphs of a device whose samples are features already: the bundle's extractor passes them through."""

    def shared_extractor(self) -> Extractor:
        return GivenFeatures(self._bundle.manifest.features)
