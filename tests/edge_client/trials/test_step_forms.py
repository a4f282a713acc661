"""Further forms of a training step: which one a device takes, and what it does with a wrong one or one that crashes.

The forms here are the bundle's own step, a step that is wrong and one that is none; ONNX Runtime's blocked operators
are in tests/export/operators/test_channel_runs.py. Children are real processes.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle, write_bundle
from protofleet.contract.errors import BundleError
from protofleet.edge_client.trials import step_forms, trials_file
from protofleet.edge_client.trials.step_forms import FILE, FormTrial, choose_step_form, tried

FAST = FormTrial("fast", portable_ms=100.0, form_ms=60.0, error=1e-5, allowed=1e-2)


@pytest.fixture(scope="module")
def path(mnist_like_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a right form, one whose weights move too far, and one that no runtime can load."""
    b = read_bundle(mnist_like_bundle("fedproto"))
    model = onnx.load_from_string(b.train_step)
    node = next(n for n in model.graph.node if any(o == "head.bias.next" for o in n.output))
    node.op_type = "Add"  # bias + rate · gradient
    wrong = model.SerializeToString()
    model.graph.node[0].domain = "elsewhere"
    model.opset_import.add(domain="elsewhere", version=1)
    made = tmp_path_factory.mktemp("forms") / "forms.bundle"
    forms = {"right": b.train_step, "wrong": wrong, "alien": model.SerializeToString()}
    write_bundle(
        made, b.manifest, features=b.features, train_step=b.train_step, params=b.params, vectors=b.vectors, forms=forms
    )
    return made


@pytest.fixture
def bundle(path: Path) -> Bundle:
    return read_bundle(path)


def _only(bundle: Bundle, *names: str) -> Bundle:
    return replace(bundle, forms={name: b"graph " + name.encode() for name in names})


def test_forms_are_members_that_are_hashed_and_may_read_nothing_else(
    path: Path, bundle: Bundle, tmp_path: Path
) -> None:
    assert set(bundle.forms) == {"right", "wrong", "alien"}
    assert {f"train_step.{name}.onnx" for name in bundle.forms} <= set(bundle.manifest.members)
    model = onnx.load_from_string(bundle.train_step)
    outside = model.graph.initializer[0]
    outside.ClearField("raw_data")
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="/etc/passwd")
    parts = {"features": bundle.features, "train_step": bundle.train_step, "params": bundle.params}
    with pytest.raises(BundleError, match=r"train_step\.outside\.onnx"):
        write_bundle(tmp_path / "x", bundle.manifest, **parts, forms={"outside": model.SerializeToString()})


def test_the_fastest_right_form_takes_the_steps_place(bundle: Bundle, said: list[str]) -> None:
    trials = {
        "slow": replace_trial("slow", form_ms=90.0),
        "fast": FAST,
        "off": replace_trial("off", form_ms=1.0, error=0.1),
    }
    found = choose_step_form(_only(bundle, *trials), Path(), try_one=trials.__getitem__)
    assert found.train_step == b"graph fast"
    assert not found.forms
    assert said == ["trains with fast: 60 ms where the portable step takes 100, off by 1e-05, allowed 0.01"]


def replace_trial(form: str, **changes: float) -> FormTrial:
    return FormTrial(form, **{"portable_ms": 100.0, "form_ms": 60.0, "error": 1e-5, "allowed": 1e-2, **changes})


@pytest.mark.parametrize(
    ("trial", "word"),
    [
        (replace_trial("f", form_ms=96.0), "96 ms"),
        (replace_trial("f", error=0.02), "off by 0.02"),
        (FormTrial("f", failed="not a registered function/op"), "not a registered"),
    ],
)
def test_what_does_not_pay_or_is_wrong_leaves_the_portable_step(
    bundle: Bundle, trial: FormTrial, word: str, said: list[str]
) -> None:
    found = choose_step_form(_only(bundle, "f"), Path(), try_one=lambda form: trial)
    assert found.train_step == bundle.train_step
    assert not found.forms
    assert said[0].startswith("trains with the portable step; f: ")
    assert word in said[0]


def test_a_bundle_without_forms_tries_nothing(bundle: Bundle, tmp_path: Path) -> None:
    plain = replace(bundle, forms={})
    assert choose_step_form(plain, Path(), state=tmp_path, try_one=lambda form: pytest.fail("tried")) is plain
    assert not list(tmp_path.iterdir())


def test_a_right_form_is_right_and_a_wrong_one_is_not(bundle: Bundle) -> None:
    assert tried(bundle, "right").is_right
    wrong = tried(bundle, "wrong")
    assert not wrong.failed
    assert not wrong.is_right
    assert wrong.allowed <= 0.3
    assert "elsewhere" in tried(bundle, "alien").failed


def test_what_came_of_it_holds_for_this_runtime_processor_bundle_and_threads(bundle, tmp_path, monkeypatch) -> None:
    asked: list[str] = []

    def once(form: str) -> FormTrial:
        asked.append(form)
        return replace_trial(form)

    def settled(**changes: object) -> Bundle:
        return choose_step_form(_only(bundle, "fast"), Path(), state=tmp_path, try_one=once, **changes)

    assert settled().train_step == settled().train_step == b"graph fast"
    assert asked == ["fast"]
    settled(threads=2)
    settled()
    assert len(asked) == 2
    monkeypatch.setattr(step_forms, "processor", lambda: "another")
    settled()
    assert len(asked) == 3
    (tmp_path / FILE).write_text(json.dumps({"schema": 1, "key": [], "threads": {"1": "x"}}))
    settled()
    assert len(asked) == 4
    monkeypatch.setattr(step_forms.ort, "__version__", "9.9")
    settled()
    assert len(asked) == 5
    bundle = replace(bundle, sha256=bytes(32))
    settled()
    assert len(asked) == 6
    choose_step_form(_only(bundle, "fast", "more"), Path(), state=tmp_path, try_one=once)
    choose_step_form(_only(bundle, "fast", "more"), Path(), state=tmp_path, try_one=once)
    assert asked[6:] == ["more"], "what was known is kept beside what is new"


def test_a_state_directory_that_cannot_be_written_costs_another_trial(bundle, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trials_file, "whole_file", lambda path: (_ for _ in ()).throw(OSError("read-only")))
    found = choose_step_form(_only(bundle, "fast"), Path(), state=tmp_path, try_one=lambda form: FAST)
    assert found.train_step == b"graph fast"
    assert not list(tmp_path.iterdir())


def test_a_form_that_ends_the_process_that_tries_it_ends_nothing_else(
    bundle, path, tmp_path, monkeypatch, said: list[str]
) -> None:
    crash = tmp_path / "crash"
    crash.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crash.chmod(crash.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(step_forms.sys, "executable", str(crash))
    found = choose_step_form(replace(bundle, forms={"right": b"x"}), path, state=tmp_path)
    assert found.train_step == bundle.train_step
    assert said[0] == "tries right, a further form of the training step, once: in a process of its own"
    assert "ended with -11" in said[-1]


def test_a_child_tries_the_real_form(path: Path, bundle: Bundle, said: list[str]) -> None:
    alien = choose_step_form(replace(bundle, forms={"alien": bundle.forms["alien"]}), path)
    assert alien.train_step == bundle.train_step
    assert "elsewhere" in said[-1]


def test_the_processor_is_told_from_what_changes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "processor\t: 0\nmodel name\t: X\ncpu MHz\t: 1\nflags\t: a b\n\nprocessor\t: 1\n"
    told = []
    for text in (words, words.replace("MHz\t: 1", "MHz\t: 2"), words.replace("a b", "a b avx")):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text, **_: text)
        told.append(step_forms.processor())
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize(
    ("moves", "error", "allowed"),
    [
        ((1.0, 1.0, float("nan")), 1e30, 0.01),
        ((1.0, 1.0, float("inf")), 1e30, 0.01),
        ((1.0, 9.0, 1.29), 0.29, 0.3),
        ((float("nan"), float("nan"), float("nan")), 1e30, 0.01),
    ],
)
def test_what_is_no_number_is_wrong_and_a_lively_step_excuses_30_percent(bundle, monkeypatch, moves, error, allowed):
    """`moves`: of the portable step, of the same nudged, of the form."""
    steps = iter(({"w": np.array([move])}, 1.0) for move in moves)
    monkeypatch.setattr(step_forms, "step_on", lambda *_: next(steps))
    found = tried(bundle, "right")
    assert (found.error, found.allowed) == (pytest.approx(error), allowed)
