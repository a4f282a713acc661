"""`predict --precision int8`: a form that answers alike and faster is used after the trial, any other never.

The fleet is the one of `test_predict.py`: what real processes left. How fast a form is depends on the processor, so
tests set what has to be gained.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from fleets import bundle, error_line, run
from onnx import numpy_helper

import protofleet
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.answers import int8_answers
from protofleet.edge_client.answers.int8_answers import TRIED, int8_file
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.export.graphs.precision import features_fp32, features_int8
from tests.edge_client.answers.test_predict import Finished, frozen, trained  # noqa: F401


@pytest.fixture
def fleet(frozen: Finished) -> Finished:  # noqa: F811
    return frozen


@pytest.fixture
def beside(fleet: Finished, tmp_path: Path) -> Callable[[onnx.ModelProto | bytes], Path]:
    """Puts a form beside a copy of the fleet's bundle; the bundle's path."""

    def put(form: onnx.ModelProto | bytes) -> Path:
        path = tmp_path / "f.bundle"
        shutil.copy(fleet.bundle, path)
        int8_file(path).write_bytes(form if isinstance(form, bytes) else form.SerializeToString())
        return path

    return put


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_answers, "GAIN", np.inf)


def _asked(fleet: Finished, path: Path, precision: str = "int8") -> protofleet.Predictor:
    return protofleet.Predictor(fleet.state(), bundle=path, precision=precision)


def _many(fleet: Finished, count: int) -> np.ndarray:
    return np.resize(fleet.x, (count, *fleet.x.shape[1:]))


def test_after_the_trial_answers_follow_from_the_form_in_int8(fleet: Finished, beside: Callable[..., Path]) -> None:
    form = features_int8(read_bundle(fleet.bundle), fleet.x)
    path, x = beside(form), _many(fleet, TRIED + 20)
    predictor = _asked(fleet, path)
    exact = _asked(fleet, path, "fp32").with_features(x)[0]
    assert predictor.int8_line == f"answers in float until {TRIED} photos were tried in int8, too"
    features, answers = predictor.with_features(x)
    np.testing.assert_allclose(features[:TRIED], exact[:TRIED], rtol=1e-5, atol=1e-6)
    integer = open_session(form.SerializeToString(), "form")[0].run(["z"], {"x": x[TRIED:]})[0]
    np.testing.assert_allclose(features[TRIED:], integer, rtol=1e-5, atol=1e-6)
    assert np.abs(features[TRIED:] - exact[TRIED:]).max() > 1e-4
    assert len(answers) == len(x)
    assert predictor.int8_line.startswith("answers in int8: ")
    assert f" of {TRIED} answered alike" in predictor.int8_line


def test_a_trial_of_photos_one_by_one_ends_like_one_of_many(fleet: Finished, beside: Callable[..., Path]) -> None:
    path, x = beside(features_fp32(read_bundle(fleet.bundle))), _many(fleet, TRIED)
    predictor = _asked(fleet, path)
    for photo in x[:-1]:
        predictor(photo)
    assert "until" in predictor.int8_line
    predictor(x[-1])
    assert predictor.int8_line.endswith(f"{TRIED} of {TRIED} answered alike")


def test_a_form_that_answers_otherwise_is_not_used(fleet: Finished, beside: Callable[..., Path]) -> None:
    form = features_fp32(read_bundle(fleet.bundle))
    for tensor in form.graph.initializer:  # as integer sums that saturate: every product is another
        value = numpy_helper.to_array(tensor)
        if value.ndim > 1:
            tensor.CopyFrom(numpy_helper.from_array(-value, tensor.name))
    path, x = beside(form), _many(fleet, TRIED + 10)
    predictor, exact = _asked(fleet, path), _asked(fleet, path, "fp32")
    np.testing.assert_allclose(predictor.with_features(x)[0], exact.with_features(x)[0], rtol=1e-5, atol=1e-6)
    assert predictor.int8_line.startswith("answers in float; int8: ")


def test_a_form_that_is_slower_is_not_used(
    fleet: Finished, beside: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8_answers, "GAIN", 0.0)
    predictor = _asked(fleet, beside(features_fp32(read_bundle(fleet.bundle))))
    predictor(_many(fleet, TRIED))
    assert predictor.int8_line.startswith("answers in float; int8: ")


def test_threads_count_photos_once(fleet: Finished, beside: Callable[..., Path]) -> None:
    predictor = _asked(fleet, beside(features_fp32(read_bundle(fleet.bundle))))
    with ThreadPoolExecutor(8) as pool:
        assert all(len(answers) == 7 for answers in pool.map(predictor, [_many(fleet, 7)] * 30))
    assert predictor.int8_line.endswith(f"{TRIED} of {TRIED} answered alike")


def test_own_weights_answer_in_float(trained: Finished, beside: Callable[..., Path]) -> None:  # noqa: F811
    path = beside(features_fp32(read_bundle(trained.bundle)))
    shutil.copy(trained.bundle, path)
    predictor = protofleet.Predictor(trained.state(), bundle=path, way="prototype", precision="int8")
    assert predictor.basis.startswith("own weights")
    predictor(_many(trained, TRIED))
    assert "until" in predictor.int8_line


def test_what_is_no_form_of_this_bundle_ends_in_one_line(
    fleet: Finished, beside: Callable[..., Path], tmp_path: Path
) -> None:
    path = beside(b"no graph")
    words = ("predict", fleet.photos, "--state", fleet.state(), "--bundle", path, "--precision")
    code, said = run(*words, "int8")
    assert code
    assert "f.int8.onnx" in error_line(said)
    other = read_bundle(bundle(tmp_path / "other.bundle", "ncm", input_shape=(28, 28, 1)))
    int8_file(path).write_bytes(features_fp32(other).SerializeToString())
    code, said = run(*words, "int8")
    assert code
    assert "f.int8.onnx" in error_line(said)
    int8_file(path).unlink()
    code, said = run(*words, "int8")
    assert code
    assert "--target" in error_line(said)
    code, said = run(*words, "int9")
    assert code
    assert "int8" in error_line(said)


def test_the_command_says_what_came_of_it(fleet: Finished, beside: Callable[..., Path]) -> None:
    path = beside(features_fp32(read_bundle(fleet.bundle)))
    code, said = run("predict", *[fleet.photos] * 3, "--state", fleet.state(), "--bundle", path, "--precision", "int8")
    assert not code, said
    assert f"answers in float until {TRIED} photos were tried in int8, too" in said
