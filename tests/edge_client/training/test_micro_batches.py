"""A batch in parts: the same step as the whole batch, by torch in float64; ragged parts, objectives, batch norm."""

from pathlib import Path

import numpy as np
import pytest
import torch
from edge_samples import fashion

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import method as method_named
from protofleet.edge_client.training.trainer import Trainer
from protofleet.export.backbones.backbone import find_backbone
from protofleet.export.bundles.build import build_bundle
from protofleet.export.steps.step import Preprocess, plan_step
from protofleet.export.verify.verify import EagerStep, Images

SHAPE, LABELS = (16, 16, 1), [str(i) for i in range(10)]
BATCH, PART = 8, 3  # parts of 3, 3 and 2

METHODS = [
    "fedproto",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedhp", "fedhkd", "fedpr", "spherefed")),
]


def bundle_of(folder: Path, name: str, **options: object) -> Bundle:
    settings = {"backbone": "small_cnn", "labels": LABELS, "input_shape": SHAPE, "batch": BATCH, **options}
    build_bundle(method_name=name, out=folder / "parts.bundle", micro_batch=PART, **settings)  # type: ignore[arg-type]
    return read_bundle(folder / "parts.bundle")


def given_of(bundle: Bundle, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = bundle.manifest.given_shapes
    made = {name: rng.dirichlet(np.ones(shape[-1]), shape[:-1]).astype(np.float32) for name, shape in shapes.items()}
    return {**made, "prototype_mask": (np.arange(10) % 3 != 1).astype(np.float32)}


def exact_step(bundle: Bundle, data, given: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """One step of torch on all of `data` as one batch."""
    m, entry = bundle.manifest, method_named(bundle.manifest.method)
    net = find_backbone("small_cnn", SHAPE, None, seed=0, weights=None).net
    plan = plan_step(net, entry, m.hyper, m.head, m.classes, m.features)
    state = {t.name: bundle.params.get(t.name, np.zeros(t.shape, np.float32)) for t in plan.state}
    further = {name: value for name, value in given.items() if not name.startswith("prototype")}
    batch = Images(data.x, data.y, given["prototypes"], given["prototype_mask"], np.ones(len(data), bool), further)
    return EagerStep(net, Preprocess(m.mean, m.std), plan, dtype).run(state, batch, 0.05)


def fitted(bundle: Bundle, data, given: dict[str, np.ndarray], *, in_parts: bool, epochs: int = 1):
    trainer = Trainer(bundle, in_parts=in_parts)
    trainer.load_state(bundle.params)
    loss = trainer.fit(data, epochs=epochs, lr=0.05, given=given, seed=1)
    return trainer.export_state(), loss


def far(found, exact) -> float:
    return float(np.sqrt(sum(((found[name] - exact[name]) ** 2).sum() for name in found)))


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_in_ragged_parts_is_the_step_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    """As near to float64 as a whole batch in float32 is, by torch or by the bundle's own step."""
    bundle = bundle_of(tmp_path, name)
    data, given = fashion(bundle, BATCH, (0, 3, 8)), given_of(bundle, np.random.default_rng(0))
    exact, single = (exact_step(bundle, data, given, dtype) for dtype in (torch.float64, torch.float32))
    parts, loss = fitted(bundle, data, given, in_parts=True)
    whole, _ = fitted(bundle, data, given, in_parts=False)
    assert loss == pytest.approx(float(exact["loss"]), rel=1e-5)
    rounding = max(far({n: single[n] for n in parts}, exact), far(whole, exact))
    moved = far({n: bundle.params[n] for n in parts}, exact)
    assert far(parts, exact) <= 4 * rounding < 1e-3 * moved
    again, _ = fitted(bundle, data, given, in_parts=True, epochs=3)  # momentum goes on from step to step
    thrice, _ = fitted(bundle, data, given, in_parts=False, epochs=3)
    assert far(again, thrice) < 1e-3 * far({n: bundle.params[n] for n in thrice}, thrice)


@pytest.mark.slow
def test_batch_norm_takes_the_statistics_of_each_part(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, "fedproto", norm="batch")
    given = given_of(bundle, np.random.default_rng(0))
    few = fashion(bundle, PART, (0, 3, 8))
    parts, whole = (fitted(bundle, few, given, in_parts=each)[0] for each in (True, False))
    assert far(parts, whole) < 1e-4 * far({n: bundle.params[n] for n in whole}, whole)  # one part is the whole batch
    many = fashion(bundle, 2 * PART, (0, 3, 8))
    parts, whole = (fitted(bundle, many, given, in_parts=each)[0] for each in (True, False))
    mean = next(name for name in bundle.manifest.names("buffer") if name.endswith("running_mean"))
    start, seen = bundle.params[mean], (whole[mean] - 0.9 * bundle.params[mean]) / 0.1  # of the whole batch
    assert not np.allclose(parts[mean], whole[mean])
    # 0.1 m₂ + 0.09 m₁ + 0.81 r, and m₁ + m₂ is twice the mean of both where parts are of one size
    halfway = 0.81 * start + 0.19 * seen
    assert np.abs(parts[mean] - halfway).max() < 0.02 * np.abs(seen).max() + 1e-3


def test_what_is_no_mean_over_samples_and_what_has_no_parts_is_refused(tmp_path: Path, mnist_like_bundle) -> None:
    with pytest.raises(UsageError, match="a loss that is a mean over samples, got fedproto as it is set"):
        bundle_of(tmp_path, "fedproto", hyper={"reading": "class_mean"})
    with pytest.raises(UsageError, match="1 to 2, less than --batch, got 3"):
        bundle_of(tmp_path, "fedproto", batch=3)
    with pytest.raises(UsageError, match="a method that trains, got ffc"):
        bundle_of(tmp_path, "ffc")
    with pytest.raises(UsageError, match="graphs for parts of a batch, got one without, try exporting it anew"):
        Trainer(read_bundle(mnist_like_bundle()), in_parts=True)
