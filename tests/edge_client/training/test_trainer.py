"""The trainer and the extractor against loops that a reader can believe: plain runs of the same graphs, and torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from edge_samples import fashion

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import BundleError, MethodError
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training import onnx_session
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.onnx_session import Provider, give_back, open_session
from protofleet.edge_client.training.trainer import Trainer
from protofleet.export.bundles.build import build_bundle

SEED = 20


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle())


@pytest.fixture(scope="module")
def data(bundle: Bundle) -> LocalData:
    return fashion(bundle, 3 * bundle.manifest.batch + 5, (0, 3, 8))  # the last batch has five samples


def prototypes(bundle: Bundle) -> tuple[np.ndarray, np.ndarray]:
    m = bundle.manifest
    mask = np.zeros(m.classes, np.float32)
    mask[[0, 8]] = 1
    return np.random.default_rng(1).random((m.classes, m.features), np.float32) * mask[:, None], mask


def naive_fit(bundle: Bundle, data: LocalData, epochs: int, lr: float) -> tuple[dict[str, np.ndarray], float]:
    """The same training through `session.run`: every tensor goes through numpy at every step.

    The session is the trainer's, or the two would round differently and, after a few steps, train differently.
    """
    m = bundle.manifest
    session, _ = open_session(bundle.train_step, "train_step.onnx", threads=1, training=True)
    state = {t.name: bundle.params.get(t.name, np.zeros(t.shape, np.float32)) for t in m.state}
    proto, mask = prototypes(bundle)
    order, losses = np.random.default_rng(SEED), []
    names = [o.name for o in session.get_outputs()]
    for _ in range(epochs):
        shuffled = order.permutation(len(data))
        for start in range(0, len(data), m.batch):
            rows = shuffled[start : start + m.batch]
            padding = m.batch - len(rows)
            feed = {
                "x": np.concatenate([data.x[rows], np.zeros((padding, *m.input_shape), np.uint8)]),
                "y": np.concatenate([data.y[rows], np.zeros(padding, np.int64)]),
                "sample_weight": np.array([1.0] * len(rows) + [0.0] * padding, np.float32),
                "prototypes": proto,
                "prototype_mask": mask,
                "lr": np.array(lr, np.float32),
            }
            out = dict(zip(names, session.run(None, {**feed, **state}), strict=True))
            losses += [float(out["loss"])] * len(rows)
            state = {name: out.get(f"{name}.next", value) for name, value in state.items()}
    return {name: state[name] for name in m.names("param", "buffer")}, float(np.mean(losses))


def fit(
    bundle: Bundle, data: LocalData, trainer: Trainer, epochs: int = 2, lr: float = 0.05, seed: int = SEED
) -> float:
    proto, mask = prototypes(bundle)
    return trainer.fit(data, epochs=epochs, lr=lr, given={"prototypes": proto, "prototype_mask": mask}, seed=seed)


def test_training_equals_the_naive_loop(bundle: Bundle, data: LocalData) -> None:
    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    loss = fit(bundle, data, trainer)
    expected, expected_loss = naive_fit(bundle, data, 2, 0.05)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    state = trainer.export_state()
    assert set(state) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
        assert not np.array_equal(value, bundle.params[name]), f"{name} was never trained"


def test_every_round_starts_with_the_optimizer_at_zero(bundle: Bundle, data: LocalData) -> None:
    """Momentum left over from an earlier fit would make the second result differ."""
    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    fit(bundle, data, trainer)
    first = trainer.export_state()
    trainer.load_state(bundle.params)
    fit(bundle, data, trainer)
    for name, value in trainer.export_state().items():
        np.testing.assert_array_equal(value, first[name])


def test_the_seed_fixes_the_result(bundle: Bundle, data: LocalData) -> None:
    results = []
    for seed in (1, 1, 2):
        trainer = Trainer(bundle)
        trainer.load_state(bundle.params)
        fit(bundle, data, trainer, epochs=1, seed=seed)
        results.append(trainer.export_state()["head.weight"])
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_exported_state_is_a_copy(bundle: Bundle, data: LocalData) -> None:
    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    before = trainer.export_state()
    fit(bundle, data, trainer, epochs=1)
    np.testing.assert_array_equal(before["head.weight"], bundle.params["head.weight"])


def test_training_learns(bundle: Bundle, data: LocalData) -> None:
    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    first = fit(bundle, data, trainer, epochs=1)
    assert fit(bundle, data, trainer, epochs=5) < 0.7 * first


def test_on_step_counts(bundle: Bundle, data: LocalData) -> None:
    trainer, steps = Trainer(bundle), []
    trainer.load_state(bundle.params)
    proto, mask = prototypes(bundle)

    def on_step(done: int, total: int) -> None:
        steps.append((done, total))

    trainer.fit(data, epochs=2, lr=0.01, given={"prototypes": proto, "prototype_mask": mask}, seed=0, on_step=on_step)
    assert steps == [(done, 8) for done in range(1, 9)]


def test_divergence_is_an_error_not_a_contribution(bundle: Bundle, data: LocalData) -> None:
    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    with pytest.raises(MethodError, match=r"training diverged, expected a finite loss, got .* try .*smaller lr"):
        fit(bundle, data, trainer, epochs=5, lr=1e12)


def test_features_equal_torch_under_trained_weights(bundle: Bundle, data: LocalData) -> None:
    from protofleet.export.backbones.backbone import build_backbone

    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    fit(bundle, data, trainer)
    trained = {**bundle.params, **trainer.export_state()}
    net, _ = build_backbone("small_cnn", (28, 28, 1))
    own = {name.removeprefix("backbone."): torch.from_numpy(value) for name, value in trained.items() if name[0] == "b"}
    net.load_state_dict(own)
    m = bundle.manifest
    pixels = (torch.from_numpy(data.x).float() / 255 - torch.tensor(m.mean)) / torch.tensor(m.std)
    with torch.no_grad():
        expected = net.eval()(pixels.permute(0, 3, 1, 2)).numpy()
    features = Extractor(bundle, trained).features(data.x)
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(features, Extractor(bundle, bundle.params).features(data.x), atol=1e-3)


def test_blocks_are_the_whole_in_order(bundle: Bundle, data: LocalData) -> None:
    extractor = Extractor(bundle, bundle.params)
    whole = extractor.features(data.x)
    for size in (1, 7, 16, 1000):
        parts = list(extractor.blocks(data.x, size))
        assert [rows.start for rows, _ in parts] == list(range(0, len(data), size))
        # Another number of images may be added up in another order: sums of up to 1,152 terms, in float32.
        np.testing.assert_allclose(np.concatenate([z for _, z in parts]), whole, rtol=1e-4, atol=1e-5)


# Alone in its process: a test runner's own threads take and give memory, too.
_KEPT_AFTER_SEVERAL = """
import json, sys
from pathlib import Path

import numpy as np

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.hardware.process_metrics import release_memory
from protofleet.edge_client.training.extractor import Extractor

def anonymous_kb():  # what a process has that is no file's, once all that is free was given back
    release_memory()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

bundle = read_bundle(Path(sys.argv[1]))
x = np.random.default_rng(3).integers(0, 256, (int(sys.argv[2]), *bundle.manifest.input_shape), np.uint8)
extractor = Extractor(bundle, bundle.params, 1, gives_back=sys.argv[3] == "gives back")
first = extractor.features(x[:1])
before = anonymous_kb()
several = extractor.features(x)
kept = anonymous_kb() - before
print(json.dumps([kept, several.tolist(), np.array_equal(extractor.features(x[:1]), first)]))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell what a process has")
def test_a_session_that_stays_gives_back_what_several_photos_needed(mnist_like_bundle: Callable[..., Path]) -> None:
    kept_kb, features = {}, {}
    for way in ("keeps", "gives back"):
        command = [sys.executable, "-c", _KEPT_AFTER_SEVERAL, str(mnist_like_bundle()), "64", way]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        kept_kb[way], features[way], first_is_the_same = json.loads(done.stdout)
        assert first_is_the_same, way
    assert kept_kb["keeps"] > 1000, kept_kb
    assert kept_kb["gives back"] < kept_kb["keeps"] / 2, kept_kb
    assert features["gives back"] == features["keeps"]


def test_the_extractor_that_a_camera_keeps_gives_back(bundle: Bundle) -> None:
    assert CompiledGraphs(bundle, keeps_shared=True).shared_extractor()._gives_back
    assert not CompiledGraphs(bundle, keep=True).shared_extractor()._gives_back  # the lab's, over many photos all day


def test_what_falls_back_gives_nothing_back(bundle: Bundle, data: LocalData) -> None:
    feed = {"x": data.x[:1]}
    session, _ = open_session(bundle.features, "features.onnx", weights=_of_backbone(bundle))
    other, _ = open_session(
        bundle.features, "features.onnx", weights=_of_backbone(bundle), provider=Provider("cuda", falls_back=True)
    )
    assert give_back(session, ["z"], feed)
    assert not give_back(other, ["z"], feed)
    assert not give_back(session, ["no such output"], feed)


def _of_backbone(bundle: Bundle) -> dict[str, np.ndarray]:
    return {name: bundle.params[name] for name in bundle.manifest.weights}


def test_graphs_that_do_not_fit_are_refused(bundle: Bundle, mnist_like_bundle: Callable[..., Path]) -> None:
    other = read_bundle(mnist_like_bundle("spherefed", hyper={"epochs": 1}))
    with pytest.raises(BundleError, match=r"cannot load train_step\.onnx, expected a graph"):
        Trainer(dataclasses.replace(bundle, train_step=b"not a graph"))
    with pytest.raises(BundleError, match=r"cannot load features\.onnx"):
        Extractor(bundle, {**bundle.params, "backbone.9.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(BundleError, match=r"expected the manifest's inputs and outputs"):
        Trainer(dataclasses.replace(bundle, train_step=other.train_step))
    with pytest.raises(BundleError, match=r"expected a bundle with train_step\.onnx, got one without"):
        Trainer(dataclasses.replace(bundle, train_step=None))


@pytest.mark.parametrize(
    "changes",
    [{"batch": 7}, {"labels": ("a", "b")}, {"features": 129}, {"input_shape": (27, 28, 1)}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_manifest_that_says_otherwise_than_its_graphs_is_found_out(
    bundle: Bundle, data: LocalData, changes: dict[str, object]
) -> None:
    """Hashes say nothing of it: the first run does, in one line that names the graph."""
    other = dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, **changes), vectors=None)
    images = np.zeros((9, *other.manifest.input_shape), np.uint8)
    trainer = Trainer(other)
    trainer.load_state(other.params)
    with pytest.raises(BundleError, match=r"train_step\.onnx, expected the manifest's inputs and outputs"):
        trainer.fit(LocalData(images, np.zeros(9, np.int64)), epochs=1, lr=0.1, given={}, seed=SEED)
    if {"features", "input_shape"} & set(changes):
        with pytest.raises(BundleError, match=r"features\.onnx"):
            Extractor(other, other.params).features(images)


@pytest.mark.parametrize(
    ("threads", "version", "spins"), [(1, "1.31.1", "0"), (2, "1.31.1", "1"), (4, "1.26.0", "1"), (4, "1.25.1", "0")]
)
def test_threads_look_for_work_for_a_moment_only(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, threads: int, version: str, spins: str
) -> None:
    """One that cannot be told for how long does not look at all."""
    monkeypatch.setattr(onnx_session.ort, "__version__", version)
    session, _ = open_session(bundle.train_step, "train_step.onnx", threads=threads, training=True)
    told = session.get_session_options()  # type: ignore[attr-defined]
    assert told.get_session_config_entry("session.intra_op.allow_spinning") == spins
    if spins == "1":
        assert 0 < int(told.get_session_config_entry("session.intra_op.spin_duration_us")) <= 100
        assert told.get_session_config_entry("session.force_spinning_stop") == "1"


def test_a_batch_is_filled_up_with_its_first_sample(bundle: Bundle, data: LocalData) -> None:
    trainer, none = Trainer(bundle), bundle.manifest.batch - 2
    trainer._fill(data, np.arange(bundle.manifest.batch))
    trainer._fill(data, np.array([7, 3]))
    assert [*trainer._sample_weight] == [1.0, 1.0, *[0.0] * none]
    assert [*trainer._y] == [*data.y[[7, 3]], *[0] * none]
    np.testing.assert_array_equal(trainer._images["x"], data.x[[7, 3, *[7] * none]])


@pytest.mark.slow
def test_a_last_batch_of_one_photo_trains(tmp_path: Path):
    """What is normalised by one value's variance must not make infinities of padding, which times 0 are no numbers."""
    path = tmp_path / "one_pixel.bundle"
    sizes = {"input_shape": (8, 8, 3), "batch": 4, "micro_batch": 3}
    build_bundle(backbone="short_networks:one_pixel", method_name="fedproto", labels=["a", "b"], out=path, **sizes)
    bundle, draw = read_bundle(path), np.random.default_rng(0)
    photos = LocalData(draw.integers(0, 256, (5, 8, 8, 3), np.uint8), np.array([0, 1, 0, 1, 0]))
    for in_parts in (False, True):  # of 4 photos and one, or of 3, one and one
        trainer = Trainer(bundle, in_parts=in_parts)
        trainer.load_state(bundle.params)
        assert np.isfinite(trainer.fit(photos, epochs=2, lr=0.01, given={}, seed=0))
        assert np.isfinite(trainer.export_state()["head.weight"]).all()
