"""A batch in parts, where memory does not hold the training step of a whole batch.

One step of the optimizer, with the bundle's gradients.onnx and update.onnx (export/steps/micro.py):

1. Each part of at most b samples goes through gradients.onnx, from the same weights. Its gradients are written to the
   place of the next weights, which nobody needs yet. They are added up, each part times its share of the batch's
   samples.
2. Running statistics of batch normalisation change once for each part. A part is normalised by its own statistics.
3. update.onnx takes the sums as the gradients of the batch, and writes the next weights and optimizer state.

So a step needs one more copy of the weights than a whole batch does, and the intermediates of b samples in place of B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.errors import BundleError, UsageError
from protofleet.edge_client.training.onnx_session import open_session

__all__ = ["MicroBatches"]

Arrays = Mapping[str, NDArray[Any]]
_GRADIENT = "gradient."
_WRONG: tuple[type[Exception], ...] = (*ORT_ERRORS, KeyError)


class MicroBatches:
    """The two graphs, bound to a trainer's buffers.

    Args:
        bundle: one that has them.
        threads: within an operator.
        inputs: all that the training step reads besides the state in `now`, by name, and the state as well.
        now, next: the two state buffers, which are swapped after each step.

    Raises:
        UsageError: the bundle has no such graphs.
        BundleError: they are not what the manifest says.
    """

    def __init__(self, bundle: Bundle, threads: int, inputs: Arrays, now: Arrays, next: Arrays) -> None:
        m = bundle.manifest
        if bundle.micro is None:
            raise UsageError(
                "--micro-batch",
                expected="a bundle with graphs for parts of a batch",
                got="one without",
                hint=f"exporting it anew with --micro-batch {max(1, m.batch // 4)}",
            )
        self._samples, self._running = m.micro_batch, m.names("buffer")
        self._gradients, self._update = (
            open_session(graph, name, threads=threads, training=True)[0]
            for graph, name in zip(bundle.micro, ("gradients.onnx", "update.onnx"), strict=True)
        )
        outputs = [output.name for output in self._gradients.get_outputs()]  # type: ignore[attr-defined]
        moved = [name.removeprefix(_GRADIENT) for name in outputs if name.startswith(_GRADIENT)]
        self._loss = np.zeros((), np.float32)
        try:
            self._sums = {name: np.zeros_like(now[name]) for name in moved}
            given = {**inputs, **{_GRADIENT + name: total for name, total in self._sums.items()}}
            self._sides = [self._bound(given, now, next), self._bound(given, next, now)]
        except _WRONG as error:
            raise _others(error) from None

    def step(self, chosen: NDArray[np.int64], fill: Callable[[NDArray[np.int64]], None]) -> float:
        """One step of the optimizer from `now` to `next`, and the mean loss of the batch.

        Args:
            chosen: which samples (at most B).
            fill: puts some of them, b at most, where the graph reads them.
        """
        (forward, update, now, written), total = self._sides[0], 0.0
        try:
            for start in range(0, len(chosen), self._samples):
                part = chosen[start : start + self._samples]
                share = np.float32(len(part) / len(chosen))
                fill(part)
                self._gradients.run_with_iobinding(forward)  # type: ignore[attr-defined]
                total += float(self._loss) * len(part)
                for name, summed in self._sums.items():
                    gradient = written[name]
                    np.multiply(gradient, share, out=gradient)
                    np.add(summed, gradient, out=summed) if start else np.copyto(summed, gradient)
                for name in self._running:
                    np.copyto(now[name], written[name])
            self._update.run_with_iobinding(update)  # type: ignore[attr-defined]
        except ORT_ERRORS as error:
            raise _others(error) from None
        self._sides.reverse()
        return total / len(chosen)

    def _bound(self, given: Arrays, now: Arrays, written: Arrays) -> tuple[Any, Any, Arrays, Arrays]:
        """Bindings of both graphs that read `now` and write `written`; OrtValues on the CPU share numpy's memory."""
        places = {"loss": self._loss, **{_GRADIENT + name: written[name] for name in self._sums}}
        places |= {f"{name}.next": array for name, array in written.items()}
        return (
            _binding(self._gradients, {**given, **now}, places),
            _binding(self._update, {**given, **now}, places),
            now,
            written,
        )


def _binding(session: Any, inputs: Arrays, outputs: Arrays) -> Any:
    binding = session.io_binding()
    for tensor in session.get_inputs():
        binding.bind_ortvalue_input(tensor.name, ort.OrtValue.ortvalue_from_numpy(inputs[tensor.name]))
    for tensor in session.get_outputs():
        binding.bind_ortvalue_output(tensor.name, ort.OrtValue.ortvalue_from_numpy(outputs[tensor.name]))
    return binding


def _others(error: Exception) -> BundleError:
    expected = "the manifest's inputs and outputs"
    return BundleError("gradients.onnx and update.onnx", expected=expected, got=error)
