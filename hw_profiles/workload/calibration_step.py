"""What a method's statistic costs on the device, and what FFC and CCVR cost on the server, as workloads.

On the device, for N local samples whose features the forward pass has just given:

    prototypes   each feature vector is added to its class's sum                   N*D additions
    ffc          Gram matrix Σ z zᵀ (D x D), class sums Σ z yᵀ (SphereFed eq. 9)   one product over N
    ccvr         class means, and a covariance (D x D) for each class              C products, over N/C samples each

On the server:

    ffc          A + λI factored (D³/3 operations) and solved for C right-hand sides   (SphereFed eq. 10)
    ccvr         a square root of each class's covariance (as many each), V virtual features drawn from each class
                 (a product each), and the classifier trained on the C*V of them for some epochs

The Cholesky factorisations run on the array as blocks of 32 columns: a panel, then a rank-32 update of what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from contract.errors import UsageError, near_names
from contract.methods import DEFAULT, Method, closing_method, method
from contract.payload import sent_bytes
from hw_profiles.workload.model import Gemm, Layer, Tensor, Workload

__all__ = ["STATISTICS", "VIRTUAL_PER_CLASS", "server_work", "statistic_bytes", "statistic_work"]

Statistic = Literal["none", "prototypes", "ffc", "ccvr"]
STATISTICS: Mapping[str, str] = {
    "none": "nothing",
    "prototypes": "class sums and counts",
    "ffc": "Gram matrix, class sums and counts",
    "ccvr": "class means, class covariances and counts",
}
_SENT: Mapping[str, Method] = {"prototypes": method(DEFAULT), "ffc": closing_method()}
VIRTUAL_PER_CLASS: Mapping[int, int] = {10: 500, 100: 500, 200: 1000}  # SphereFed Tab. 16; 10 classes as CIFAR-100
_PANEL = 32


def statistic_work(statistic: str, samples: int, classes: int, width: int) -> Workload:
    """The statistic itself, over `samples` features of `width` D. The forward pass is not in it.

    Raises:
        UsageError: for an unknown statistic.
    """
    _check(statistic)
    tensors: dict[str, Tensor] = {}
    layers: list[Layer] = []
    features = _tensor(tensors, "features", samples, width)
    if statistic != "none":
        sums = _tensor(tensors, "class_sums", classes, width)
        layers.append(_layer("class sums", "statistic", (features,), (sums,), ops=samples * width))
    if statistic == "ffc":
        gram = _tensor(tensors, "gram", width, width)
        layers.append(_layer("gram", "statistic", (features,), (gram,), (Gemm(width, width, samples),)))
    if statistic == "ccvr":
        covariance = _tensor(tensors, "covariances", classes, width, width)
        each = Gemm(width, width, max(1, -(-samples // classes)), classes)
        ops = samples * width + classes * width * width  # centre, then scale
        layers.append(_layer("covariances", "statistic", (features,), (covariance,), (each,), ops))
    return Workload(
        f"{statistic} statistic", samples, tuple(layers), tensors, tuple(n for n in tensors if n != features)
    )


def server_work(
    statistic: str, classes: int, width: int, *, virtual: int = 500, epochs: int = 1, batch: int = 64
) -> Workload:
    """What the server computes once all statistics are in.

    Args:
        virtual: features that CCVR draws for each class.
        epochs: of CCVR's training on them; the paper does not say how many.
        batch: of that training.

    Raises:
        UsageError: for a statistic without server work.
    """
    _check(statistic)
    tensors: dict[str, Tensor] = {}
    layers: list[Layer] = []
    if statistic == "ffc":
        gram = _tensor(tensors, "gram", width, width)
        sums, head = _tensor(tensors, "class_sums", classes, width), _tensor(tensors, "head", classes, width)
        layers.append(_layer("factor", "statistic", (gram,), (gram,), _cholesky(width), width * width))
        layers.append(_layer("solve", "statistic", (gram, sums), (head,), _triangular(width, classes) * 2))
    if statistic == "ccvr":
        layers += _ccvr_server(tensors, classes, width, virtual, epochs, batch)
    return Workload(f"{statistic} server", 1, tuple(layers), tensors)


def statistic_bytes(statistic: str, classes: int, width: int) -> int:
    """What one device sends. Ours are encoded as they travel: class means in f32, FFC's sums in f64.

    CCVR has no message here: its numbers are counted in f64 as FFC's are, covariances as their upper triangle.
    """
    _check(statistic)
    if statistic in _SENT:
        return sent_bytes(_SENT[statistic], classes, width)
    triangle = width * (width + 1) // 2
    return 8 * classes * (triangle + width + 1) if statistic == "ccvr" else 0


def _ccvr_server(
    tensors: dict[str, Tensor], classes: int, width: int, virtual: int, epochs: int, batch: int
) -> list[Layer]:
    covariance = _tensor(tensors, "covariances", classes, width, width)
    noise, drawn = (
        _tensor(tensors, "noise", classes * virtual, width),
        _tensor(tensors, "virtual", classes * virtual, width),
    )
    roots = tuple(Gemm(g.m, g.n, g.k, g.count * classes) for g in _cholesky(width))
    layers = [
        _layer("roots", "statistic", (covariance,), (covariance,), roots, classes * width * width),
        _layer(
            "draw",
            "statistic",
            (covariance, noise),
            (drawn,),
            (Gemm(virtual, width, width, classes),),
            _drawing_ops(classes * virtual, width),
        ),
    ]
    steps = epochs * -(-classes * virtual // batch)
    head = _tensor(tensors, "head", classes, width)
    logits = _tensor(tensors, "logits", batch, classes)
    products = (Gemm(batch, classes, width, steps), Gemm(width, classes, batch, steps))
    ops = steps * (10 * batch * classes + 4 * classes * width)
    layers.append(_layer("fine-tune", "statistic", (drawn, head), (logits, head), products, ops))
    return layers


def _drawing_ops(samples: int, width: int) -> int:
    """A normal number takes about 8 operations, the mean one."""
    return 9 * samples * width


def _cholesky(width: int) -> tuple[Gemm, ...]:
    """Left to right in panels of 32 columns: the rank-32 updates of the trailing matrix, which are most of D³/3."""
    found = []
    for start in range(0, width, _PANEL):
        left = width - start
        panel = min(_PANEL, left)
        found.append(Gemm(left, panel, panel))  # the panel itself, as a product of its height
        if left > panel:
            found.append(Gemm(left - panel, max(1, (left - panel) // 2), panel))  # the lower half of the update
    return tuple(found)


def _triangular(width: int, columns: int) -> tuple[Gemm, ...]:
    """Forward substitution for `columns` right-hand sides, in the same panels."""
    return tuple(Gemm(_PANEL, columns, max(1, start + _PANEL)) for start in range(0, width, _PANEL))


def _tensor(tensors: dict[str, Tensor], name: str, *shape: int) -> str:
    tensors[name] = Tensor(name, shape, "activation")
    return name


def _layer(
    name: str, phase: Literal["statistic"], reads: tuple[str, ...], writes: tuple[str, ...],
    gemms: tuple[Gemm, ...] = (), ops: int = 0,
) -> Layer:  # fmt: skip
    return Layer(name, "MatMul" if gemms else "Add", "linear" if gemms else "reduce", phase, reads, writes, gemms, ops)


def _check(statistic: str) -> None:
    if statistic not in STATISTICS:
        raise UsageError(
            "unknown statistic", expected="a statistic", got=statistic, hint=near_names(statistic, STATISTICS)
        )
