"""Which execution provider does what: the choice alone, and trials of the real CPU and of providers that are wrong.

This build of ONNX Runtime has no other provider than the CPU. A wrong one is played by the CPU's session behind a door
that adds to features, or raises; whatever CUDA, TensorRT and XNNPACK really do is not tested here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edge_samples import announcement, fashion
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.test_vectors import TOLERANCE, Vectors, distance, probe_images
from protofleet.contract.errors import BundleError, UsageError
from protofleet.edge_client.answers.predictor import Predictor
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.hardware.providers import NEAR, PROVIDERS, Choice, Trial, choose, wanted_trials
from protofleet.edge_client.training import onnx_session
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.onnx_session import CPU, Provider, Providers
from protofleet.edge_client.training.trainer import Trainer
from protofleet.edge_client.trials.provider_trials import FILE, apart, choose_providers, tried, tried_apart

CPU_TRIAL = Trial("cpu", image_ms=20.0, block_ms=10.0, error=1e-7, step_ms=100.0, step_error=0.0)
FAST = Trial("cuda", image_ms=4.0, block_ms=1.0, error=1e-6, step_ms=10.0, step_error=1e-5)


# ── the choice ──────────────────────────────────────────────────────────────────────────────────────────────────────


def uses(choice: Choice) -> tuple[str, ...]:
    return (choice.shared, choice.own, choice.training, choice.answers, choice.own_answers)


def test_a_provider_that_is_fast_and_right_does_everything_and_the_line_says_why() -> None:
    found = choose([CPU_TRIAL, FAST], "auto", has_vectors=True)
    assert uses(found) == ("cuda",) * 5
    assert found.line == "runs on cuda; cuda 4 ms a photo, cpu 20, a step 10 ms, cpu 100"


def test_one_beyond_the_tolerance_gives_answers_only() -> None:
    found = choose([CPU_TRIAL, replace(FAST, error=2 * TOLERANCE)], "auto", has_vectors=True)
    assert uses(found) == ("cpu", "cpu", "cuda", "cuda", "cuda")
    assert found.line.startswith("statistics on cpu, training and answers on cuda; ")
    assert "off the bundle's test vectors by 0.0001, allowed 5e-05: for answers only" in found.line


def test_one_that_is_plainly_wrong_does_nothing_even_where_it_is_named() -> None:
    for wanted in ("auto", "cuda"):
        found = choose([CPU_TRIAL, replace(FAST, error=0.5, step_error=0.5)], wanted, has_vectors=True)
        assert uses(found) == ("cpu",) * 5
        assert found.line == "runs on cpu; cuda is wrong: its features are off by 0.5"


def test_without_test_vectors_statistics_stay_on_the_cpu() -> None:
    found = choose([CPU_TRIAL, FAST], "cuda", has_vectors=False)
    assert uses(found) == ("cpu", "cpu", "cuda", "cuda", "cuda")
    assert "the bundle has no test vectors: for answers only" in found.line


def test_a_wrong_step_or_none_leaves_training_on_the_cpu() -> None:
    for trial in (replace(FAST, step_error=2 * NEAR), replace(FAST, step_ms=None, step_failed="no kernel")):
        found = choose([CPU_TRIAL, trial], "auto", has_vectors=True)
        assert (found.shared, found.training) == ("cuda", "cpu")
        assert "its training step is off by 0.02" in found.line or "no training step: no kernel" in found.line


def test_one_that_is_hardly_faster_is_left_unless_it_is_named() -> None:
    slow = replace(FAST, provider="xnnpack", image_ms=19.0, block_ms=9.5, step_ms=95.0)
    assert uses(choose([CPU_TRIAL, slow], "auto", has_vectors=True)) == ("cpu",) * 5
    assert uses(choose([CPU_TRIAL, slow], "xnnpack", has_vectors=True)) == ("xnnpack",) * 5


def test_sums_are_timed_in_batches_and_answers_photo_by_photo() -> None:
    quick_alone = replace(FAST, image_ms=1.0, block_ms=50.0)
    assert uses(choose([CPU_TRIAL, quick_alone], "auto", has_vectors=True)) == ("cpu", "cpu", "cuda", "cuda", "cuda")
    quick_together = replace(FAST, image_ms=50.0, block_ms=1.0)
    assert uses(choose([CPU_TRIAL, quick_together], "auto", has_vectors=True)) == ("cuda", "cuda", "cuda", "cpu", "cpu")


def test_a_step_is_compared_by_its_change_of_the_weights() -> None:
    change = {"w": np.array([3e-7, 0.0], np.float32), "b": np.array([4e-7], np.float32)}
    off = {"w": change["w"], "b": change["b"] * np.float32(1.5)}
    assert apart(off, change) == pytest.approx(0.4)


def test_other_processors_are_asked_for_whole_float32() -> None:
    (_, cuda), _ = Provider("cuda").settings(1)
    (_, engine), (_, under), _ = Provider("tensorrt").settings(1)
    assert cuda["use_tf32"] == under["use_tf32"] == engine["trt_fp16_enable"] == engine["trt_int8_enable"] == "0"


def test_tensorrt_takes_no_weights_that_training_changes() -> None:
    engine = Trial("tensorrt", image_ms=1.0, block_ms=0.5, error=1e-6)
    for wanted in ("auto", "tensorrt"):
        found = choose([CPU_TRIAL, FAST, engine], wanted, has_vectors=True)
        assert uses(found) == ("tensorrt", "cuda", "cuda", "tensorrt", "cuda")


def test_what_the_build_lacks_and_what_failed_is_said() -> None:
    assert choose([CPU_TRIAL], "cuda", has_vectors=True, build="onnxruntime 1.31").line == (
        "runs on cpu; cuda is not in this onnxruntime 1.31"
    )
    broken = Trial("cuda", failed="libcudnn.so.9: cannot open shared object file")
    found = choose([CPU_TRIAL, broken], "auto", has_vectors=True)
    assert found.line == "runs on cpu; cuda cannot be used: libcudnn.so.9: cannot open shared object file"


def test_only_what_the_build_has_is_tried_and_the_cpu_always() -> None:
    assert wanted_trials("auto", ("cpu", "cuda")) == ("cpu", "cuda")
    assert wanted_trials("cuda", ("cpu",)) == wanted_trials("cpu", ("cpu", "cuda")) == ("cpu",)
    assert wanted_trials("tensorrt", tuple(PROVIDERS)) == ("cpu", "cuda", "tensorrt")


maybe_ms = st.none() | st.floats(0.01, 1e4)
maybe_error = st.none() | st.floats(0, 1) | st.sampled_from([TOLERANCE, 2 * TOLERANCE, NEAR, float("inf")])
trials = st.builds(
    Trial,
    provider=st.sampled_from([*PROVIDERS][1:]),
    image_ms=maybe_ms,
    block_ms=maybe_ms,
    error=maybe_error,
    failed=st.sampled_from(["", "it crashed"]),
    step_ms=maybe_ms,
    step_error=maybe_error,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(trials, unique_by=lambda t: t.provider), st.sampled_from(["auto", *PROVIDERS]), st.booleans())
def test_whatever_was_tried_nothing_is_summed_that_does_not_reproduce_the_vectors(others, wanted, has_vectors) -> None:
    found = choose([CPU_TRIAL, *others], wanted, has_vectors=has_vectors)
    by_name = {trial.provider: trial for trial in [CPU_TRIAL, *others]}
    for name in (found.shared, found.own):
        trial = by_name[name]
        assert name == "cpu" or (has_vectors and not trial.failed and trial.error <= TOLERANCE)
    for name in (found.answers, found.own_answers):
        assert name == "cpu" or (not by_name[name].failed and by_name[name].error <= NEAR)
    assert "tensorrt" not in (found.own, found.training, found.own_answers)
    assert "\n" not in found.line


# ── trials, and providers that are wrong ────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def path(mnist_like_bundle: Callable[..., Path]) -> Path:
    return mnist_like_bundle()


@pytest.fixture(scope="module")
def bundle(path: Path) -> Bundle:
    return read_bundle(path)


class Wrong:
    """The CPU's session, whose features are off by a share of themselves; or one that raises from some run on."""

    def __init__(self, session, off: float, dies_after: int, least: int) -> None:
        self.session, self.off, self.left, self.least = session, off, dies_after, least

    def run(self, outputs, feed):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("CUDA failure 2: out of memory")
        found = self.session.run(outputs, feed)
        if len(feed.get("x", ())) < self.least:
            return found
        return [value * np.float32(1 + self.off) if value.dtype == np.float32 else value for value in found]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`cuda(off=…, dies_after=…)`: from now on there is a provider cuda that is so wrong, `least`: for batches."""
    real = onnx_session._session

    def play(off: float = 0.0, dies_after: int = 10**9, opens: bool = True, least: int = 0) -> None:
        def session(graph, options, settings):
            if settings[0][0] != "CUDAExecutionProvider":
                return real(graph, options, settings)
            if not opens:
                raise RuntimeError("libcudnn.so.9: cannot open shared object file")
            return Wrong(real(graph, options, settings[-1:]), off, dies_after, least)

        monkeypatch.setattr(onnx_session, "_session", session)
        monkeypatch.setattr("protofleet.edge_client.trials.provider_trials.providers_built_in", lambda: ("cpu", "cuda"))

    return play


def settle(bundle: Bundle, path: Path):
    """As a device does, with every trial in this process and the stranger said to be ten times as fast."""

    def one(name: str) -> Trial:
        found = tried(bundle, Provider(name))
        times = (found.image_ms, found.block_ms, found.step_ms)
        image, block, step = (each and each * (0.1 if name == "cuda" else 1) for each in times)
        return replace(found, image_ms=image, block_ms=block, step_ms=step)

    return choose_providers(bundle, path, try_one=one)


def test_the_cpu_reproduces_what_the_exporter_wrote(bundle: Bundle) -> None:
    assert bundle.vectors is not None
    np.testing.assert_array_equal(bundle.vectors.x, probe_images(bundle.manifest.input_shape))
    found = tried(bundle, CPU)
    assert found.failed == found.step_failed == ""
    assert found.error <= TOLERANCE
    assert min(found.image_ms, found.block_ms, found.step_ms) > 0


@pytest.mark.parametrize(
    ("off", "expected"),
    [(1e-6, ("cuda", "cuda")), (4 * TOLERANCE, ("cpu", "cuda")), (0.2, ("cpu", "cpu"))],
    ids=["right", "TF32", "wrong"],
)
def test_a_provider_that_perturbs_features_is_caught(bundle, path, cuda, off, expected) -> None:
    cuda(off=off)
    choice = settle(bundle, path).choice
    assert (choice.shared, choice.answers) == expected


def test_a_provider_that_is_wrong_for_a_whole_batch_only_is_caught(bundle, path, cuda) -> None:
    cuda(off=0.2, least=2)
    choice = settle(bundle, path).choice
    assert (choice.shared, choice.answers) == ("cpu", "cpu")


def test_a_provider_that_cannot_be_opened_is_left_and_why_is_said(bundle, path, cuda) -> None:
    cuda(opens=False)
    choice = settle(bundle, path).choice
    assert uses(choice) == ("cpu",) * 5
    assert "cuda cannot be used: libcudnn.so.9: cannot open shared object file" in choice.line


@pytest.mark.parametrize("fails", ["at once", "later"])
def test_one_that_fails_after_it_was_chosen_is_replaced_by_the_cpu_with_a_line(
    bundle, cuda, fails, said: list[str]
) -> None:
    cuda(opens=fails == "later", dies_after=1)
    choice = Choice("cuda", "cuda", "cuda", "cuda", "cuda")
    data = fashion(bundle, bundle.manifest.batch + 3, (0, 1))
    graphs, plain = CompiledGraphs(bundle, providers=Providers(choice)), CompiledGraphs(bundle)
    features = graphs.shared_extractor().features(data.x)
    np.testing.assert_array_equal(features, plain.shared_extractor().features(data.x))
    states = []
    for each in (graphs, plain):
        trainer = each.trainer()
        trainer.load_state(bundle.params)
        trainer.fit(data, epochs=1, lr=0.01, given={}, seed=1)
        states.append(trainer.export_state())
    for name, value in states[1].items():
        np.testing.assert_allclose(states[0][name], value, rtol=1e-5, atol=1e-7)
    said = [line for line in said if not line.startswith("decoding")]  # of the images, in a process that has not yet
    assert len(said) == 2
    assert said[0].startswith("features.onnx: cuda failed, cpu takes over (")


def test_a_step_elsewhere_is_the_step_here(bundle: Bundle, cuda) -> None:
    """The same session, its state carried through numpy at each step instead of bound in place."""
    cuda()
    data = fashion(bundle, bundle.manifest.batch + 3, (0, 3, 8))
    losses, states = [], []
    for provider in (CPU, Provider("cuda")):
        trainer = Trainer(bundle, 1, provider)
        trainer.load_state(bundle.params)
        losses.append(trainer.fit(data, epochs=2, lr=0.01, given={}, seed=3))
        states.append(trainer.export_state())
    assert losses[0] == losses[1]
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value)


class Counted:
    """Counts which providers are tried; cuda gives `found`."""

    def __init__(self, bundle: Bundle, path: Path, state: Path, found: Trial) -> None:
        self.bundle, self.path, self.state, self.found = bundle, path, state, found
        self.names: list[str] = []

    def settle(self, wanted: str = "auto", bundle: Bundle | None = None, threads: int = 1) -> Choice:
        def one(name: str) -> Trial:
            self.names.append(name)
            return CPU_TRIAL if name == "cpu" else self.found

        options = {"wanted": wanted, "threads": threads, "state": self.state, "try_one": one}
        return choose_providers(bundle or self.bundle, self.path, **options).choice


def test_trials_are_remembered_for_this_runtime_and_this_bundle(bundle, path, cuda, tmp_path) -> None:
    cuda()
    device = Counted(bundle, path, tmp_path, FAST)
    first = device.settle()
    assert device.settle() == first
    assert device.names == ["cpu", "cuda"]
    device.settle(threads=2)
    device.settle(threads=1)
    assert len(device.names) == 4
    table = json.loads((tmp_path / FILE).read_text())
    table["key"]["onnxruntime"] = "1.0"
    (tmp_path / FILE).write_text(json.dumps(table))
    device.settle()
    device.settle(bundle=replace(bundle, sha256=bytes(32)))
    (tmp_path / FILE).write_text("no JSON")
    device.settle()
    assert device.names == ["cpu", "cuda"] * 5


def test_what_failed_is_remembered_too_until_it_is_named(bundle, path, cuda, tmp_path) -> None:
    cuda()
    device = Counted(bundle, path, tmp_path, Trial("cuda", failed="no driver"))
    device.settle()
    assert device.settle().line.endswith(f"(as tried before; remove {tmp_path / FILE} to try again)")
    assert device.names == ["cpu", "cuda"]
    device.settle("cuda")
    assert device.names == ["cpu", "cuda", "cuda"]
    device.settle()
    assert len(device.names) == 3  # and what was known of the CPU still is


def test_another_build_tries_anew_and_without_a_state_tensorrt_is_not_compiled(
    bundle, path, cuda, tmp_path, monkeypatch
) -> None:
    cuda()
    device = Counted(bundle, path, tmp_path, FAST)
    device.settle()
    built = ("cpu", "cuda", "tensorrt")
    monkeypatch.setattr("protofleet.edge_client.trials.provider_trials.providers_built_in", lambda: built)
    device.settle()
    assert device.names == ["cpu", "cuda", *built]
    device.state = None
    device.settle()
    assert device.names[5:] == ["cpu", "cuda"]
    device.settle("tensorrt")
    assert device.names[7:] == list(built)


def test_a_cpu_that_cannot_run_the_bundle_is_one_line(bundle, path, cuda, tmp_path) -> None:
    cuda()
    with pytest.raises(BundleError, match=r"features\.onnx on cpu, expected an inference, got no such operator"):
        choose_providers(bundle, path, try_one=lambda name: Trial(name, failed="no such operator"))


@pytest.mark.parametrize("written", ["[" * 100_000, None], ids=["a file that nobody wrote", "a CPU that failed once"])
def test_no_remembered_trial_bars_the_cpu(bundle, path, cuda, tmp_path, written: str | None) -> None:
    cuda()
    device = Counted(bundle, path, tmp_path, FAST)
    first = device.settle()
    table = json.loads((tmp_path / FILE).read_text())
    table["threads"]["1"][0]["failed"] = "not enough memory, once"
    (tmp_path / FILE).write_text(written or json.dumps(table))
    assert device.settle() == first


def test_a_trial_in_a_process_of_its_own_is_what_it_is_here(bundle: Bundle, path: Path) -> None:
    apart = tried_apart(
        [sys.executable, "-m", "protofleet.edge_client.trials.provider_trials", str(path), "cpu", "1", ""], "cpu"
    )
    assert apart.failed == ""
    assert apart.error == tried(bundle, CPU).error


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.abort()", "ended with -6"),
        ("import sys; sys.exit('no driver')", "ended with 1 no driver"),
        ("print('hello')", "said nothing"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
    ids=["crashes", "ends", "babbles", "hangs"],
)
def test_a_provider_that_ends_or_hangs_its_process_ends_no_device(code: str, why: str) -> None:
    found = tried_apart([sys.executable, "-c", code], "cuda", patience_s=0.5 if "sleep" in code else 60)
    assert why in found.failed
    assert uses(choose([CPU_TRIAL, found], "auto", has_vectors=True)) == ("cpu",) * 5


# ── with what there really is ───────────────────────────────────────────────────────────────────────────────────────


def test_this_build_takes_the_cpu_and_says_that_there_is_nothing_else(bundle: Bundle, path: Path, tmp_path) -> None:
    choice = choose_providers(bundle, path, state=tmp_path).choice
    assert uses(choice) == ("cpu",) * 5
    assert choice.line.startswith("runs on cpu; onnxruntime ")
    assert choice.line.endswith(" has no other provider")
    named = choose_providers(bundle, path, wanted="tensorrt", state=tmp_path).choice
    assert uses(named) == ("cpu",) * 5
    assert "tensorrt is not in this onnxruntime" in named.line
    assert not (tmp_path / FILE).exists()
    with pytest.raises(UsageError, match="--provider, expected auto, cpu, xnnpack, cuda or tensorrt, got gpu"):
        choose_providers(bundle, path, wanted="gpu")


def test_onnx_runtime_never_falls_back_behind_our_back(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="this build has no CUDAExecutionProvider"):
        Extractor(bundle, bundle.params, 1, Provider("cuda"))


def test_a_processor_that_does_not_reproduce_the_vectors_sums_nothing_and_answers(bundle: Bundle) -> None:
    wrong = replace(bundle, vectors=Vectors(bundle.vectors.x, bundle.vectors.z * np.float32(1.001)))
    data = fashion(bundle, 30, (0, 1))
    with pytest.raises(
        BundleError, match=r"expected the features of the bundle's test vectors, got others, off by 0.001"
    ):
        Device(wrong, data, "a").run_round(announcement(wrong, method="ffc"), None)
    for right in (bundle, replace(bundle, vectors=None)):
        assert Device(right, data, "a").run_round(announcement(right, method="ffc"), None).samples == 30
    assert len(Predictor(wrong)(data.x)) == 30


@pytest.mark.parametrize("shape", [(28, 28, 1), (5, 3, 3), (1, 1, 1)])
def test_probe_images_are_the_same_everywhere(shape: tuple[int, int, int]) -> None:
    found = probe_images(shape)
    assert found.shape == (3, *shape)
    np.testing.assert_array_equal(found, probe_images(shape))
    if shape == (5, 3, 3):
        assert found[0, 0].tolist() == GOLDEN


GOLDEN = [[37, 189, 152], [131, 41, 100], [129, 167, 102]]


def test_a_distance_is_that_of_the_worst_image_and_of_no_numbers_infinite() -> None:
    z = np.array([[3.0, 4.0], [0.0, 1.0]], np.float32)
    assert distance(z + np.array([[0, 0.05], [0, 0.001]]), z) == pytest.approx(0.01)
    assert distance(np.full_like(z, np.nan), z) == distance(z[:1], z) == float("inf")
