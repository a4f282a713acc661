"""Local training on stock ONNX Runtime: the bundle's `train_step.onnx`, run over and over.

The step is a pure function (docs/bundle.md):

    x, y, sample_weight, prototypes, prototype_mask, lr, further…, state…  →  loss, state′…

A round:

1. `load_state` puts weights in and zeroes the optimizer.
2. `fit` shuffles the samples from a seed. For each batch it fills the batch buffer, runs the step, and swaps the two
   state buffers. So the next step reads what this one wrote, and no tensor is copied between steps.
3. A last batch that is not full is padded with sample weight 0, which the graph leaves out of its loss and its
   statistics.
4. `export_state` copies the weights out.

Where only the tail of the network is trained, the step takes the activations of its frozen trunk in place of the photos
(`edge_client/training/frozen_trunk.py`). Nothing else changes.

Where memory does not hold a whole batch, it is trained in parts (`micro_batches.py`), if the bundle has the graphs.

The optimizer's state starts at zero in every round, as in FedProto's public code, which makes a new optimizer for each
local update. Momentum of weeks ago tells nothing about a loss whose prototypes have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import STEP_INPUTS, Bundle, Manifest
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.errors import BundleError, DivergedError
from protofleet.contract.sums.plausibility import LARGEST_NORM
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.samples import release_pages
from protofleet.edge_client.training.micro_batches import MicroBatches
from protofleet.edge_client.training.onnx_session import CPU, Provider, open_session

__all__ = ["Activations", "OnStep", "Trainer", "Weights", "check_weights", "diverged"]

Weights = Mapping[str, NDArray[np.float32]]
OnStep = Callable[[int, int], None]


class Activations(Protocol):
    """Gives what a frozen trunk makes of photos."""

    def fill(self, x: NDArray[np.uint8], rows: NDArray[np.int64], into: Sequence[NDArray[np.float32]]) -> None:
        """Write the activations of these rows of `x` to the beginning of the arrays `into`, (B, …) each."""


def diverged(expected: str, got: str) -> DivergedError:
    """The error of a round whose training came to nothing."""
    return DivergedError("training diverged", expected=expected, got=got, hint="a bundle exported with a smaller lr")


def _other_step(error: Exception) -> BundleError:
    return BundleError("train_step.onnx", expected="the manifest's inputs and outputs", got=error)


def check_weights(weights: Weights, manifest: Manifest) -> None:
    """That weights which were kept are those of a bundle, or none.

    Raises:
        BundleError: other names, other shapes, or numbers that are not float32 or not finite.
    """
    shapes = {t.name: t.shape for t in manifest.state if t.role in ("param", "buffer")}
    fit = {name: value.shape for name, value in weights.items()} == shapes
    if weights and not (fit and all(v.dtype == np.float32 and np.isfinite(v).all() for v in weights.values())):
        raise BundleError("device state", expected="the bundle's tensors", got="others", hint="another --state")


class Trainer:
    """The compiled training step of a bundle, and the two buffers that hold its state in turn.

    Args:
        bundle: one that trains.
        threads: within an operator.
        provider: where the step runs. On the CPU it reads and writes the two buffers directly. Elsewhere they are
            copied there and back at each step.
        in_parts: train each batch in parts of the bundle's micro-batch, on the CPU.

    Raises:
        BundleError: when the bundle has no training step, or its step is not the one the manifest describes.
    """

    def __init__(self, bundle: Bundle, threads: int = 1, provider: Provider = CPU, *, in_parts: bool = False) -> None:
        if bundle.train_step is None:
            raise BundleError("training", expected="a bundle with train_step.onnx", got="one without")
        self._manifest = m = bundle.manifest
        samples = m.micro_batch if in_parts else m.batch
        self._images = {} if m.cut else {STEP_INPUTS[0]: np.zeros((samples, *m.input_shape), np.uint8)}  # (B, H, W, c)
        self._activations = {tensor.name: np.zeros((samples, *tensor.shape), np.float32) for tensor in m.cut}  # (B, …)
        self._trunk: Activations | None = None
        self._y = np.zeros(samples, np.int64)  # (B,)
        self._sample_weight = np.zeros(samples, np.float32)  # (B,)
        self._given = {name: np.zeros(shape, np.float32) for name, shape in m.given_shapes.items()}
        self._lr = np.zeros((), np.float32)
        self._loss = np.zeros((), np.float32)
        self._updated = m.names("param", "buffer", "optimizer")
        self._frozen = {t.name: np.zeros(t.shape, np.float32) for t in m.state if t.role == "frozen"}
        state = {t.name: t.shape for t in m.state}
        self._now = {name: np.zeros(state[name], np.float32) for name in self._updated}
        self._next = {name: np.zeros(state[name], np.float32) for name in self._updated}
        self._parts = (
            MicroBatches(bundle, threads, self._inputs(self._now), self._now, self._next) if in_parts else None
        )
        if self._parts is not None:
            return
        self._session, _ = open_session(
            bundle.train_step, "train_step.onnx", threads=threads, training=True, provider=provider
        )
        self._bound = isinstance(self._session, ort.InferenceSession) and provider.name == "cpu"
        try:
            if self._bound:
                self._step, self._step_back = self._bind(self._now, self._next), self._bind(self._next, self._now)
        except ORT_ERRORS as error:
            raise _other_step(error) from None

    def load_state(self, params: Weights) -> None:
        """Start from these weights (roles param, buffer, frozen), with the optimizer's state at zero."""
        optimizer = set(self._manifest.names("optimizer"))
        for name, buffer in {**self._now, **self._frozen}.items():
            buffer[...] = 0.0 if name in optimizer else params[name]

    def export_state(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the trained weights and running statistics, by name."""
        return {name: self._now[name].copy() for name in self._manifest.names("param", "buffer")}

    def fit(
        self,
        data: LocalData,
        *,
        epochs: int,
        lr: float,
        given: Weights,
        seed: int,
        trunk: Activations | None = None,
        on_step: OnStep | None = None,
    ) -> float:
        """Train on all of `data`, `epochs` times over, and return the mean loss over samples and epochs.

        Args:
            data: at least one sample.
            given: the global state as the step takes it, by input name: `prototypes` (C, D), zero where there is none,
                `prototype_mask` (C,), and what else the manifest's `step_inputs` has; what is missing is zero.
            seed: fixes the order of the samples; the same seed and weights give the same result.
            trunk: where only the tail is trained.
            on_step: called after each step with the steps done and the steps in all.

        Raises:
            DivergedError: when the loss or a weight is no longer a finite number, or the loss is beyond all measure.
        """
        self._lr[...], self._trunk = lr, trunk
        for name, buffer in self._given.items():
            buffer[...] = given.get(name, 0.0)
        order = np.random.default_rng(seed)
        batch, total, done = self._manifest.batch, 0.0, 0
        steps = epochs * -(-len(data) // batch)
        for epoch in range(epochs):
            shuffled = order.permutation(len(data))  # (N,)
            for start in range(0, len(data), batch):
                chosen = shuffled[start : start + batch]
                total += self._run(data, chosen) * len(chosen)
                done += 1
                if on_step is not None:
                    on_step(done, steps)
            if not np.isfinite(total):
                raise diverged("a finite loss", f"{float(self._loss)} in epoch {epoch + 1}")
        if total > LARGEST_NORM**2 * epochs * len(data):  # further than features can be apart
            raise diverged(f"a mean loss of {LARGEST_NORM**2:g} at most", f"{total / (epochs * len(data)):.3g}")
        if not self._is_finite():  # the last step came after its loss
            raise diverged("finite weights", "others after the last step")
        return total / (epochs * len(data))

    def _is_finite(self) -> bool:
        """Whether every weight and running statistic is a number."""
        return all(bool(np.isfinite(self._now[name]).all()) for name in self._manifest.names("param", "buffer"))

    def _run(self, data: LocalData, chosen: NDArray[np.int64]) -> float:
        """One step on the chosen samples (at most B), and their mean loss."""
        if self._parts is not None:
            loss = self._parts.step(chosen, lambda part: self._fill(data, part))
            self._loss[...] = loss
            self._now, self._next = self._next, self._now
            return loss
        self._fill(data, chosen)
        if self._bound:
            try:
                self._session.run_with_iobinding(self._step)  # type: ignore[attr-defined]
            except ORT_ERRORS as error:  # shapes are compared only now
                raise _other_step(error) from None
            self._step, self._step_back = self._step_back, self._step
        else:
            self._run_elsewhere()
        self._now, self._next = self._next, self._now
        return float(self._loss)

    def _fill(self, data: LocalData, chosen: NDArray[np.int64]) -> None:
        """Put the chosen samples into the buffers that the graph reads, and pad with the first of them.

        Other padding might be far from the samples where these are alike, above all where there is only one. Batch
        normalisation then divides by next to nothing, layer after layer, and infinity times a weight of 0 is no number.
        """
        real = len(chosen)
        for images in self._images.values():
            np.take(data.x, chosen, axis=0, out=images[:real])
            release_pages(data.x)  # of a large set, no more stays in memory than a batch
        if self._trunk is not None:
            self._trunk.fill(data.x, chosen, list(self._activations.values()))
        np.take(data.y, chosen, out=self._y[:real])
        padded: list[NDArray[Any]] = [*self._images.values(), *self._activations.values()]
        for buffer in padded:
            buffer[real:] = buffer[0]
        self._y[real:] = 0
        self._sample_weight[:real], self._sample_weight[real:] = 1.0, 0.0

    def _run_elsewhere(self) -> None:
        """One step from `_now` to `_next`, whatever memory the provider computes in."""
        outputs = ["loss", *(f"{name}.next" for name in self._updated)]
        try:
            loss, *state = self._session.run(outputs, self._inputs(self._now))
        except ORT_ERRORS as error:
            raise _other_step(error) from None
        self._loss[...] = loss
        for name, value in zip(self._updated, state, strict=True):
            self._next[name][...] = value

    def _inputs(self, read: Weights) -> dict[str, NDArray[Any]]:
        """Everything that the step takes, with this state."""
        own: dict[str, NDArray[Any]] = {
            **self._images,
            **self._activations,
            "y": self._y,
            "sample_weight": self._sample_weight,
            "lr": self._lr,
        }
        return {**own, **self._given, **read, **self._frozen}

    def _bind(self, read: Weights, write: Weights) -> ort.IOBinding:
        """A binding that reads one state buffer and writes the other. OrtValues on the CPU share numpy's memory."""
        binding = self._session.io_binding()  # type: ignore[attr-defined]
        for name, array in self._inputs(read).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_output("loss", ort.OrtValue.ortvalue_from_numpy(self._loss))
        for name, array in write.items():
            binding.bind_ortvalue_output(f"{name}.next", ort.OrtValue.ortvalue_from_numpy(array))
        return binding
