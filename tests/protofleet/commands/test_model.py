"""`protofleet model`: one plain ONNX file that answers as the device does, in a runtime that knows nothing of us."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import one_error_line
from commands import run as here
from fleets import LABELS, error_line, run

import protofleet
from protofleet.commands.model import model_bytes
from protofleet.contract.errors import ExportError
from protofleet.contract.heads.answers import Answer, LinearAnswer, way_in_words
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.export.bundles.classifier import classifier
from tests.edge_client.answers.test_predict import Finished, frozen, trained  # noqa: F401

_ALONE = (
    "import sys, json, numpy as np, onnxruntime as ort;"
    "s = ort.InferenceSession(sys.argv[1]);"
    "scores, found = s.run(['scores', 'class'], {'x': np.load(sys.argv[2])});"
    "assert not {'contract', 'edge_client', 'protofleet'} & set(sys.modules);"
    "print(json.dumps([scores.tolist(), found.tolist(), s.get_modelmeta().custom_metadata_map]))"
)


def _alone(model: Path, images: Path, cwd: Path) -> tuple[np.ndarray, list[int], dict[str, str]]:
    """What onnxruntime alone makes of the file, in a process and folder where nothing of ours is."""
    command = [sys.executable, "-c", _ALONE, model, images]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)
    assert done.returncode == 0, done.stderr
    scores, found, about = json.loads(done.stdout)
    return np.array(scores), found, about


@pytest.mark.parametrize(
    ("which", "words", "way"),
    [
        ("trained", ["--state", "S"], "prototype"),
        ("trained", ["--state", "S", "--way", "head"], "head"),
        ("trained", ["--bundle", "B", "--store", "T"], "linear"),
        ("frozen", ["--state", "S"], "class_mean"),
    ],
)
def test_the_file_answers_as_the_device(
    trained: Finished,  # noqa: F811
    frozen: Finished,  # noqa: F811
    tmp_path: Path,
    which: str,
    words: list[str],
    way: str,
) -> None:
    fleet = trained if which == "trained" else frozen
    places = {"S": fleet.state(), "B": fleet.bundle, "T": fleet.store}
    code, said = run("model", tmp_path / "m.onnx", *(places.get(word, word) for word in words))
    assert code == 0, said
    assert f"answers by {way_in_words(way)}" in said
    np.save(tmp_path / "x.npy", fleet.x)
    scores, found, about = _alone(tmp_path / "m.onnx", tmp_path / "x.npy", tmp_path)
    source = fleet.bundle if "--bundle" in words else fleet.state()
    store = fleet.store if "--store" in words else None
    answers = protofleet.Predictor(source, store=store, way=way)(fleet.x)
    assert found == answers.classes.tolist()
    np.testing.assert_allclose(scores, answers.scores, rtol=1e-4, atol=1e-4)
    assert json.loads(about["labels"]) == list(LABELS)
    assert about["way"] == way


def test_the_head_is_made_again_of_the_stores_sums(trained: Finished, tmp_path: Path) -> None:  # noqa: F811
    places = ("--bundle", trained.bundle, "--store", trained.store)
    found = []
    for options, words in (
        (("--ridge", "0.5"), "round 2 of ffc solved again: ridge 0.5, as given"),
        (("--form", "discriminant"), "round 2 of ffc solved again: discriminant, ridge "),
    ):
        done = here("model", tmp_path / "m.onnx", *places, *options)
        assert done.returncode == 0, done.stderr
        assert words in done.stderr
        assert "answers by the fleet's linear head" in done.stdout
        session, _ = open_session((tmp_path / "m.onnx").read_bytes(), "the file")
        (scores,) = session.run(["scores"], {"x": trained.x})
        solve = {options[0].removeprefix("--"): options[1]}
        asked = protofleet.Predictor(trained.bundle, store=trained.store, solve=solve)
        np.testing.assert_allclose(scores, asked(trained.x).scores, rtol=1e-4, atol=1e-4)
        found.append(scores)
        done = here("predict", trained.photos, *places, *options, "--json", tmp_path / "told.jsonl")
        assert words in done.stderr
        told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
        expected = {name: answer.top(0)[0] for name, answer in asked.photos((p, p) for p in (t["photo"] for t in told))}
        assert {t["photo"]: (t["top"][0]["label"], t["top"][0]["score"]) for t in told} == expected
    assert not np.allclose(*found, rtol=0.1)
    assert not np.allclose(
        found[0], protofleet.Predictor(trained.bundle, store=trained.store)(trained.x).scores, rtol=0.1
    )


def test_a_head_is_not_made_again_where_there_are_no_sums(trained: Finished, frozen: Finished, tmp_path: Path) -> None:  # noqa: F811
    asked = (("--ridge", "0.1"), ("--ridge", "0.1", "--form", "ridge"))
    for words, said in (
        (
            ("--state", trained.state(), *asked[0]),
            "--ridge, expected --store, whose sums are solved again",
        ),
        (("--bundle", frozen.bundle, "--store", frozen.store, *asked[0]), "expected the sums of a closed round of fed"),
        (
            ("--bundle", trained.bundle, "--store", trained.store, "--way", "head", *asked[1]),
            "--ridge, --form with --way head, expected the way that is solved for, linear",
        ),
        (("--bundle", trained.bundle, "--store", frozen.store, *asked[0]), "is of another bundle"),
    ):
        done = here("model", tmp_path / "m.onnx", *words)
        assert done.returncode == 2, done.stderr
        assert said in one_error_line(done)
        assert not (tmp_path / "m.onnx").exists()


def test_nothing_but_standard_operators_and_no_other_file(frozen: Finished) -> None:  # noqa: F811
    model = onnx.ModelProto.FromString(model_bytes(protofleet.Predictor(frozen.state())))
    assert {node.domain for node in model.graph.node} == {""}
    assert not [t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert [value.name for value in model.graph.input] == ["x"]


def test_a_projected_head_and_a_class_that_nobody_holds(frozen: Finished) -> None:  # noqa: F811
    from protofleet.contract.heads.answers import linear_answer

    predictor = protofleet.Predictor(frozen.state())
    rng, width = np.random.default_rng(1), predictor.bundle.manifest.features
    present = np.array([True, False, True, True, True])
    answer = linear_answer(
        rng.normal(size=(5, 3)), rng.normal(size=5), present=present, unit=True, project=rng.normal(size=(width, 3))
    )
    session, _ = open_session(classifier(predictor.bundle, answer, {}), "it")
    scores, found = session.run(["scores", "class"], {"x": frozen.x})
    wanted = answer.scores(predictor._ready.extractor.features(frozen.x))
    np.testing.assert_allclose(scores[:, present], wanted[:, present], rtol=1e-4, atol=1e-4)
    assert found.tolist() == wanted.argmax(axis=1).tolist()
    assert (scores[:, 1] < -1e38).all()


def test_what_is_read_from_is_not_written_over(frozen: Finished) -> None:  # noqa: F811
    before = frozen.bundle.read_bytes()
    for out in (frozen.bundle, frozen.store):
        said = one_error_line(here("model", out, "--bundle", frozen.bundle, "--store", frozen.store))
        assert "would be written over, expected a file of its own" in said
    assert frozen.bundle.read_bytes() == before


def test_a_graph_that_answers_otherwise_is_found_out(frozen: Finished, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    predictor = protofleet.Predictor(frozen.state())
    answer = predictor.answering.answer
    assert isinstance(answer, LinearAnswer)
    off = replace(answer, weight=answer.weight * 1.01)
    wrong = classifier(replace(predictor.bundle, params=predictor.params), off, {})
    monkeypatch.setattr("protofleet.export.bundles.classifier.classifier", lambda *_: wrong)
    with pytest.raises(ExportError, match=r"the classifier, expected the predictor's scores, got others, by 0\.0"):
        model_bytes(predictor)


def test_what_no_file_can_hold_is_refused(frozen: Finished) -> None:  # noqa: F811
    class Odd(Answer):
        def scores(self, features):
            return features

    with pytest.raises(
        ExportError,
        match=r"expected a way of answering over protofleet\.contract\.heads\.answers\.LinearAnswer, got Odd",
    ):
        classifier(protofleet.Predictor(frozen.state()).bundle, Odd(), {})
    code, said = run("model", "m.onnx")
    assert code == 2
    assert "expected --state or --bundle, got neither" in error_line(said)
