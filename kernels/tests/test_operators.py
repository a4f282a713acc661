"""Every operator against torch in float64, on shapes that are drawn; convolutions also against a naive loop.

The set of loops is the one that the processor takes; `PROTOFLEET_KERNELS=avx2` or `baseline` tries the others.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnxruntime as ort
import protofleet_kernels
import pytest
import torch
from numpy.typing import NDArray
from one_operator import LANES, blocks, planes, run, session
from torch import nn

FAR = 64 * float(np.finfo(np.float32).eps)  # of a sum of some thousand products, relative to the largest result
Array = NDArray[np.floating]


def near(ours: Array, exact: Any, far: float = FAR) -> None:
    """Within rounding of a float64 result, relative to its largest number."""
    right = exact.detach().numpy() if isinstance(exact, torch.Tensor) else exact
    assert ours.shape == right.shape
    assert np.abs(ours - right).max() <= far * max(float(np.abs(right).max()), 1e-6)


def drawn_convolution(rng: np.random.Generator, kind: str) -> list[int]:
    """Sizes, as the operators take them."""
    n, (h, w) = int(rng.integers(1, 5)), (int(v) for v in rng.integers(1, 20, 2))
    kh, kw = (int(v) for v in rng.choice([1, 1, 2, 3, 3, 5, 7], 2))
    if rng.random() < 0.5:
        kh = kw = int(rng.choice([1, 3]))
    sh, sw = (int(v) for v in rng.choice([1, 1, 2, 3], 2))
    ph, pw = int(rng.integers(0, kh)), int(rng.integers(0, kw))
    h, w = max(h, kh - 2 * ph, 1), max(w, kw - 2 * pw, 1)
    c, o, groups = int(rng.integers(1, 70)), int(rng.integers(1, 70)), 1
    if kind == "depthwise":
        c = o = groups = int(rng.integers(2, 70))
    if kind == "grouped":
        groups = int(rng.integers(2, 4))
        c, o = (LANES * groups * int(v) for v in rng.integers(1, 3, 2))
    return [n, c, h, w, o, kh, kw, sh, sw, ph, pw, groups, int(kind == "planar")]


# arguments: the tensors of the operator
def moved_alike(image: Array, grad: Array, weight: Array, gradient: Array, sizes: list[int], threads: int = 1) -> None:
    """A kernel's step in the operator that makes its gradient is, to the bit, that of the gradient by itself."""
    velocity, rate = weight[::-1].copy(), np.float32(0.1)
    settings: dict[str, Any] = {"momentum": 0.9, "decay": 0.01}
    ours = run("ConvWeightGradSgdMomentum", [image, grad, weight, rate, velocity], 2, sizes, threads, **settings)
    apart = run("SgdMomentum", [weight, gradient, rate, velocity], 2, weight.shape, threads, **settings)
    assert all(np.array_equal(a, b) for a, b in zip(ours, apart, strict=True))
    settings["momentum"] = 0.0
    ours = run("ConvWeightGradSgd", [image, grad, weight, rate], 1, sizes, threads, **settings)
    assert np.array_equal(ours[0], run("Sgd", [weight, gradient, rate], 1, weight.shape, threads, **settings)[0])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["dense", "depthwise", "grouped", "planar"])
def test_a_convolution_and_its_gradients(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    sizes = drawn_convolution(rng, kind)
    n, c, h, w, o, kh, kw, sh, sw, ph, pw, groups, planar = sizes
    threads = 1 + seed % 2
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((n, c, h, w), (o, c // groups, kh, kw)))
    bias = rng.standard_normal(o).astype(np.float32) if seed % 3 else None
    exact_x, exact_w = (torch.from_numpy(v).double().requires_grad_() for v in (x, weight))
    exact_b = None if bias is None else torch.from_numpy(bias).double().requires_grad_()
    y = nn.functional.conv2d(exact_x, exact_w, exact_b, (sh, sw), (ph, pw), 1, groups)
    dy = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.from_numpy(dy).double())
    image, grad = x if planar else blocks(x), blocks(dy)
    near(planes(run("Conv", [image, weight, bias], 1, sizes, threads)[0], o), y)
    gradient = run("ConvWeightGrad", [image, grad], 1, sizes, threads)[0]
    near(gradient, exact_w.grad)
    moved_alike(image, grad, weight, gradient, sizes, threads)
    if not planar:
        near(planes(run("ConvInputGrad", [grad, weight], 1, sizes, threads)[0], c), exact_x.grad)
    if exact_b is not None:
        near(run("ChannelSums", [grad], 1, dy.shape, threads)[0], exact_b.grad)


@pytest.mark.parametrize("sizes", [
    [16, 20, 2, 2, 24, 3, 3, 1, 1, 1, 1, 1, 0],
    [5, 33, 1, 1, 40, 3, 3, 1, 1, 1, 1, 1, 0],
    [9, 17, 4, 4, 36, 3, 3, 2, 2, 1, 1, 1, 0],
    [20, 32, 3, 5, 32, 5, 5, 1, 2, 2, 2, 1, 0],
    [16, 64, 4, 3, 32, 3, 3, 2, 1, 1, 1, 2, 0],
    [17, 48, 8, 8, 20, 1, 1, 2, 2, 0, 0, 1, 0],
    [3, 16, 40, 40, 16, 1, 1, 1, 1, 0, 0, 1, 0],
    [6, 160, 17, 19, 24, 3, 3, 2, 2, 1, 1, 1, 0],
    [2, 1024, 16, 16, 64, 1, 1, 1, 1, 0, 0, 1, 0],
    [2, 528, 20, 20, 64, 3, 3, 2, 2, 1, 1, 1, 0],
    [2, 3, 35, 33, 40, 7, 7, 2, 2, 3, 3, 1, 1],
    [6, 2, 9, 40, 20, 3, 2, 1, 3, 1, 0, 1, 1],
])  # fmt: skip
def test_a_convolution_of_a_small_plane_and_one_of_many_pixels(sizes: list[int]) -> None:
    """Planes whose taps lie mostly beyond the edge, passes over parts of a batch or of an image, and first layers."""
    rng = np.random.default_rng(sizes[0])
    n, c, h, w, o, kh, kw, sh, sw, ph, pw, groups, planar = sizes
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((n, c, h, w), (o, c // groups, kh, kw)))
    bias = rng.standard_normal(o).astype(np.float32)
    exact_x, exact_w = (torch.from_numpy(v).double().requires_grad_() for v in (x, weight))
    y = nn.functional.conv2d(exact_x, exact_w, torch.from_numpy(bias).double(), (sh, sw), (ph, pw), 1, groups)
    dy = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.from_numpy(dy).double())
    image, grad = x if planar else blocks(x), blocks(dy)
    ours = [run("Conv", [image, weight, bias], 1, sizes, threads)[0] for threads in (1, 3)]
    near(planes(ours[0], o), y)
    gradients = [run("ConvWeightGrad", [image, grad], 1, sizes, threads)[0] for threads in (1, 3)]
    near(gradients[0], exact_w.grad)
    moved_alike(image, grad, weight, gradients[0], sizes, 2)
    pairs = [ours, gradients]
    if not planar:
        pairs.append([run("ConvInputGrad", [grad, weight], 1, sizes, threads)[0] for threads in (1, 3)])
        near(planes(pairs[-1][0], c), exact_x.grad)
    assert all(np.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("shape", [(2, 32, 8, 8, 32), (3, 40, 14, 13, 64), (2, 64, 4, 7, 24), (5, 33, 9, 6, 49),
                                   (16, 144, 4, 4, 80), (9, 24, 28, 20, 40)])  # fmt: skip
def test_a_convolution_with_fewer_products(shape: tuple[int, ...]) -> None:
    """3 × 3 by Winograd's tiles of 4 × 4: transforms with numbers up to 8, so four times what rounding else gives."""
    rng = np.random.default_rng(shape[1])
    n, c, h, w, o = shape
    sizes = [*shape, 3, 3, 1, 1, 1, 1, 1, 0]
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((n, c, h, w), (o, c, 3, 3)))
    bias, dy = rng.standard_normal(o).astype(np.float32), rng.standard_normal((n, o, h, w)).astype(np.float32)
    exact_x, exact_w = (torch.from_numpy(v).double().requires_grad_() for v in (x, weight))
    y = nn.functional.conv2d(exact_x, exact_w, torch.from_numpy(bias).double(), 1, 1)
    y.backward(torch.from_numpy(dy).double())
    image, grad = blocks(x), blocks(dy)
    near(planes(run("Conv", [image, weight, bias], 1, sizes, 2)[0], o), y, 4 * FAR)
    near(planes(run("ConvInputGrad", [grad, weight], 1, sizes, 2)[0], c), exact_x.grad, 4 * FAR)
    near(run("ConvWeightGrad", [image, grad], 1, sizes, 2)[0], exact_w.grad, 4 * FAR)
    same = [run("ConvWeightGrad", [image, grad], 1, sizes, threads)[0] for threads in (1, 3)]
    assert np.array_equal(*same)
    moved_alike(image, grad, weight, same[0], sizes)


def naive(x: Array, w: Array, stride: tuple[int, int], padding: tuple[int, int], groups: int) -> Array:
    """A convolution as the books have it, in float64."""
    (n, c, h, v), (o, _, kh, kw) = x.shape, w.shape
    oh, ow = (h + 2 * padding[0] - kh) // stride[0] + 1, (v + 2 * padding[1] - kw) // stride[1] + 1
    y = np.zeros((n, o, oh, ow))
    for b, k, i, j in np.ndindex(y.shape):
        group = k // (o // groups)
        for ci, r, s in np.ndindex(c // groups, kh, kw):
            row, column = i * stride[0] + r - padding[0], j * stride[1] + s - padding[1]
            if 0 <= row < h and 0 <= column < v:
                y[b, k, i, j] += float(x[b, group * (c // groups) + ci, row, column]) * float(w[k, ci, r, s])
    return y


@pytest.mark.parametrize("sizes", [
    [2, 3, 5, 4, 5, 3, 3, 1, 1, 1, 1, 1, 0],
    [1, 17, 4, 4, 18, 1, 1, 1, 1, 0, 0, 1, 0],
    [2, 18, 5, 6, 18, 3, 3, 2, 2, 1, 1, 18, 0],
    [1, 2, 6, 5, 4, 3, 2, 2, 1, 0, 1, 1, 1],
    [1, 32, 3, 3, 32, 3, 3, 1, 1, 1, 1, 2, 0],
])  # fmt: skip
def test_a_convolution_against_a_naive_loop(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    n, c, h, w, o, kh, kw, sh, sw, ph, pw, groups, planar = sizes
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((n, c, h, w), (o, c // groups, kh, kw)))
    ours = run("Conv", [x if planar else blocks(x), weight, None], 1, sizes)[0]
    near(planes(ours, o), naive(x, weight, (sh, sw), (ph, pw), groups))


@pytest.mark.parametrize(
    ("added", "act"), [(False, 0), (False, 1), (False, 6), (False, 3), (True, 0), (True, 1), (True, 6)]
)
@pytest.mark.parametrize("shape", [(4, 20, 3, 5), (9, 64, 1, 1), (5, 16, 7, 2)])
def test_a_batch_normalisation_over_the_real_samples(shape: tuple[int, ...], added: bool, act: int) -> None:
    """Padded samples count in no statistic, and their gradient, which is zero, stays so."""
    rng = np.random.default_rng(act)
    n, c = shape[:2]
    real = np.ones(n, np.float32)
    real[1] = 0
    x = (3 * rng.standard_normal(shape) + 50).astype(np.float32)
    weight, bias = (rng.uniform(0.5, 1.5, c).astype(np.float32) for _ in range(2))
    other = rng.standard_normal(shape).astype(np.float32) if added else None
    dy = (rng.standard_normal(shape) * real[:, None, None, None]).astype(np.float32)
    ex, ew, eb = (torch.from_numpy(v).double().requires_grad_() for v in (x, weight, bias))
    eo = torch.from_numpy(other).double().requires_grad_() if other is not None else None
    kept = ex[torch.from_numpy(real) > 0]
    mean, variance = kept.mean((0, 2, 3)), kept.var((0, 2, 3), unbiased=False)
    column = (1, c, 1, 1)
    y = (ex - mean.view(column)) * torch.rsqrt(variance + 1e-5).view(column) * ew.view(column) + eb.view(column)
    y = y if eo is None else y + eo
    y = {0: y, 1: y.clamp(min=0), 6: y.clamp(0, 6), 3: nn.functional.hardswish(y)}[act]
    y.backward(torch.from_numpy(dy).double())
    held = None if other is None else blocks(other)
    sizes = [*shape, act]
    out, m, v = run("BatchNorm", [blocks(x), weight, bias, real, held], 3, sizes, eps=1e-5)
    near(planes(out, c), y, 40 * FAR)  # the mean is fifty times the spread
    near(m, mean)
    near(v, variance, 40 * FAR)
    given = [blocks(dy), blocks(x), weight, m, v, real]
    if added:
        dx, dw, db, masked = run("BatchNormAddGrad", [*given, out], 4, sizes, eps=1e-5)
        near(planes(masked, c), eo.grad)
    else:
        dx, dw, db = run("BatchNormGrad", [*given, bias if act else None], 3, sizes, eps=1e-5)
    whole = real[:, None, None, None] > 0
    near(planes(dx, c) * whole, ex.grad.numpy() * whole, 40 * FAR)
    near(dw, ew.grad, 40 * FAR)
    near(db, eb.grad, 40 * FAR)


@pytest.mark.parametrize(("channels", "groups"), [(32, 32), (64, 32), (24, 6), (16, 1), (48, 3), (6, 3)])
def test_a_group_normalisation(channels: int, groups: int) -> None:
    rng = np.random.default_rng(groups)
    shape = (3, channels, 4, 5)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    weight, bias = (rng.uniform(0.5, 1.5, channels).astype(np.float32) for _ in range(2))
    ex, ew, eb = (torch.from_numpy(v).double().requires_grad_() for v in (x, weight, bias))
    y = nn.functional.group_norm(ex, groups, ew, eb, 1e-5)
    y.backward(torch.from_numpy(dy).double())
    sizes = [*shape, 0, groups]
    out, mean, rstd = run("GroupNorm", [blocks(x), weight, bias], 3, sizes, eps=1e-5)
    near(planes(out, channels), y)
    grads = run("GroupNormGrad", [blocks(dy), blocks(x), weight, mean, rstd], 3, sizes, eps=1e-5)
    for ours, exact in zip((planes(grads[0], channels), *grads[1:]), (ex.grad, ew.grad, eb.grad), strict=True):
        near(ours, exact)


@pytest.mark.parametrize(("plane", "kernel", "stride", "padding"),
                         [((8, 6), 2, 2, 0), ((9, 9), 3, 2, 1), ((5, 7), 3, 1, 0), ((4, 4), 4, 4, 0),
                          ((7, 9), 2, 2, 0), ((5, 6), 2, 1, 1)])  # fmt: skip
def test_a_max_pooling_gives_its_gradient_to_the_first_of_the_largest(
    plane: tuple[int, int], kernel: int, stride: int, padding: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, (2, 19, *plane)).astype(np.float32)  # many are equal
    exact = torch.from_numpy(x).double().requires_grad_()
    y = nn.functional.max_pool2d(exact, kernel, stride, padding)
    dy = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.from_numpy(dy).double())
    sizes = [*x.shape, kernel, kernel, stride, stride, padding, padding, *y.shape[2:]]
    assert np.array_equal(planes(run("MaxPool", [blocks(x)], 1, sizes)[0], 19), y.detach().numpy())
    near(planes(run("MaxPoolGrad", [blocks(dy), blocks(x)], 1, sizes)[0], 19), exact.grad)


def test_blocks_means_and_the_way_back() -> None:
    x = np.random.default_rng(0).standard_normal((3, 21, 4, 5)).astype(np.float32)
    held = run("ToBlocks", [x], 1, x.shape)[0]
    assert np.array_equal(held, blocks(x))
    assert np.array_equal(run("FromBlocks", [held], 1, x.shape)[0], x)
    near(run("GlobalMean", [held], 1, x.shape)[0], x.astype(np.float64).mean((2, 3)))


def test_a_number_per_channel_goes_to_its_plane() -> None:
    rng = np.random.default_rng(0)
    x, gate = (rng.standard_normal(s).astype(np.float32) for s in ((3, 21, 4, 5), (3, 21, 1, 1)))
    spread = run("Spread", [gate.reshape(3, 21)], 1, x.shape)[0]
    assert np.array_equal(spread, blocks(np.broadcast_to(gate, x.shape)))
    assert np.array_equal(run("ScaleChannels", [blocks(x), blocks(gate)], 1, x.shape)[0], blocks(x * gate))


def test_the_gradient_of_a_hard_swish_is_not_made_of_its_result() -> None:
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.RuntimeException, match="make no sense"):
        session("BatchNormAddGrad", [True] * 7, 4, {"sizes": [1, 16, 2, 2, 3], "eps": 1e-5})


@pytest.mark.parametrize("shape", [(7,), (3, 5), (40, 30, 3, 3), (1024, 515)])
def test_a_step_of_sgd(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    p, g, m = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    rate, wide = np.float32(0.1), [v.astype(np.float64) for v in (p, g, m)]
    v = 0.9 * wide[2] + wide[1] + 0.01 * wide[0]
    new, velocity = run("SgdMomentum", [p, g, rate, m], 2, shape, momentum=0.9, decay=0.01)
    near(velocity, v)
    near(new, wide[0] - 0.1 * v)
    near(run("Sgd", [p, g, rate], 1, shape, momentum=0.0, decay=0.01)[0], wide[0] - 0.1 * (wide[1] + 0.01 * wide[0]))


def test_a_step_of_sgd_is_written_to_any_place() -> None:
    """Of a tensor so large that it is written past the cache, which needs places that are multiples of a register."""
    shape = (1 << 19,)
    p, g = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for _ in range(2))
    opened = session("Sgd", [True] * 3, 1, {"sizes": list(shape), "momentum": 0.0, "decay": 0.01})
    room, binding = np.zeros(shape[0] + 2 * LANES, np.float32), opened.io_binding()
    place = room[(-room.ctypes.data // 4) % LANES + 1 :][: shape[0]]  # one number beyond a register's end
    for name, value in {"i0": p, "i1": g, "i2": np.float32(0.1)}.items():
        binding.bind_cpu_input(name, np.asarray(value))
    binding.bind_output("o0", "cpu", 0, np.float32, shape, place.ctypes.data)
    opened.run_with_iobinding(binding)
    near(place, p - 0.1 * (g + 0.01 * p.astype(np.float64)))


@pytest.mark.parametrize("kind", ["dense", "depthwise", "planar"])
def test_the_number_of_threads_changes_no_bit(kind: str) -> None:
    rng = np.random.default_rng(3)
    sizes = drawn_convolution(rng, kind)
    n, c, h, w, o, kh, kw, *_, groups, planar = sizes
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((n, c, h, w), (o, c // groups, kh, kw)))
    image = x if planar else blocks(x)
    y = [run("Conv", [image, weight, None], 1, sizes, threads)[0] for threads in (1, 2, 3)]
    grads = [run("ConvWeightGrad", [image, y[0]], 1, sizes, threads)[0] for threads in (1, 2, 3)]
    assert all(np.array_equal(a, b) for each in (y, grads) for a, b in itertools.pairwise(each))


@pytest.mark.parametrize("sizes", [
    [],
    [1, 16, 4, 4, 16, 3, 3, 1, 1, 1, 1, 1],
    [1, 16, 4, 4, 16, 3, 3, 0, 1, 1, 1, 1, 0],
    [1, 16, 2, 2, 16, 5, 5, 1, 1, 0, 0, 1, 0],
    [1, 16, 4, 4, 16, 3, 3, 1, 1, 3, 1, 1, 0],
    [-1, 16, 4, 4, 16, 3, 3, 1, 1, 1, 1, 1, 0],
    [1 << 20, 1 << 20, 4, 4, 16, 3, 3, 1, 1, 1, 1, 1, 0],
    [1, 16, 4, 4, 16, 3, 3, 1, 1, 1, 1, 0, 0],
    [1, 12, 4, 4, 12, 3, 3, 1, 1, 1, 1, 2, 0],
])  # fmt: skip
def test_sizes_that_make_no_sense_are_refused_when_the_graph_is_loaded(sizes: list[int]) -> None:
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.RuntimeException):
        session("Conv", [True, True, False], 1, {"sizes": sizes or [0]})


def test_a_pooling_whose_windows_lie_beyond_the_plane_is_refused() -> None:
    """Also where a window's place has more than 32 bits."""
    for sizes in ([1, 16, 4, 4, 2, 2, 2, 2, 0, 0, 3, 2], [1, 16, 4, 4, 2, 2, 1 << 20, 1, 0, 0, 4097, 3]):
        with pytest.raises(ort.capi.onnxruntime_pybind11_state.RuntimeException, match="make no sense"):
            session("MaxPool", [True], 1, {"sizes": sizes})


@pytest.mark.parametrize("act", [0, 1, 6, 3])
def test_a_number_that_is_none_is_not_hidden_by_an_activation(act: int) -> None:
    """A step that went wrong shows in all that follows."""
    x = np.ones((2, 1, 3, 3, LANES), np.float32)
    x[1, 0, 2, 2, 5] = np.nan
    ones = np.ones(LANES, np.float32)
    y, mean, variance = run("BatchNorm", [x, ones, ones, ones[:2]], 3, [2, LANES, 3, 3, act], eps=1e-5)
    for each in (y[..., 5], mean[5], variance[5]):
        assert np.isnan(each).all()
    assert np.isfinite(np.delete(y, 5, axis=-1)).all()


def test_a_pooling_gives_a_number_that_is_none() -> None:
    x = np.zeros((1, 1, 4, 4, LANES), np.float32)
    x[0, 0, 1, 2, 3] = np.nan
    sizes = [1, LANES, 4, 4, 2, 2, 2, 2, 0, 0, 2, 2]
    y = run("MaxPool", [x], 1, sizes)[0]
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 0, 0, 1, 3]]
    dx = run("MaxPoolGrad", [np.ones_like(y), x], 1, sizes)[0]
    assert dx[0, 0, 1, 2, 3] == 1


def test_a_tensor_of_another_size_is_refused() -> None:
    """A graph comes from a bundle: what it says of its tensors is never believed."""
    sizes = [1, 16, 4, 4, 16, 3, 3, 1, 1, 1, 1, 1, 0]
    x, w = np.zeros((1, 1, 4, 4, 16), np.float32), np.zeros((16, 16, 3, 3), np.float32)
    for wrong in ([x[:, :, :2], w], [x, w[:8]], [x, w[:, :, :1]]):
        with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="numbers where"):
            run("Conv", [*wrong, None], 1, sizes)


def test_the_wheel_says_what_it_is() -> None:
    assert protofleet_kernels.loops() in ("baseline", "avx2", "avx512", "neon")
    assert len(protofleet_kernels.sha256()) == 64
