"""Experiments: the same options for methods of the wire and for averaged weights, each client's own test among them."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_samples import shipped

from protofleet.contract.bundle.native_kernels import installed_kernels, uses_kernels
from protofleet.contract.errors import UsageError
from protofleet.edge_client.trials.step_forms import FormTrial, choose_step_form
from protofleet.lab.data.partition import Partition
from protofleet.lab.engine import experiment as experiments
from protofleet.lab.engine.deployed import Course, RoundRecord
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.engine.run_averaging import Measures


def _run(method: str, **given: object) -> tuple[list[RoundRecord], list[RoundRecord]]:
    experiment = Experiment(
        method,
        "fashion_mnist_subset",
        Partition("iid", 3, only=240),
        Course(rounds=2, calibrate=False),
        "fedproto_mnist",
        16,
        **{"hyper": {} if method == "ffc" else {"lr": 0.02}, **given},
    )
    shown: list[RoundRecord] = []
    records = run_experiment(
        experiment, data=shipped(), on_round=shown.append, on_device=lambda n, t: None, on_text=lambda text: None
    )
    return records, shown


@pytest.mark.parametrize("method", ["fedproto", "local", "ffc", "fedavg"])
def test_each_client_keeps_a_test_of_its_own(method: str) -> None:
    records, shown = _run(method, local_test=0.25, measures=Measures(personal=("fit",)), test_samples=60)
    assert [record.as_json() for record in shown] == [record.as_json() for record in records]
    last = records[-1].as_json()
    way = {"ffc": "linear", "fedavg": "head"}.get(method, "prototype")
    assert 0 < last["local_test"][way] <= 1
    assert bool(last["personal"]) == (method != "ffc")
    _check_what_lies_behind(records[-1], way)


def _check_what_lies_behind(last: RoundRecord, way: str) -> None:
    """Each client's accuracy and each class's agree with the means; heads that are averaged say how sure they were."""
    for part in ("all_classes", "own_classes", "local_test"):
        assert len(last.clients[f"{part}/{way}"]) == 3
        assert sum(last.clients[f"{part}/{way}"]) / 3 == pytest.approx(getattr(last, part)[way])
    shares = last.per_class[f"all_classes/{way}"]
    assert len(shares) == 10
    assert all(0 <= share <= 1 for share in shares if share is not None)
    assert last.method != "average" or 0 <= last.calibration["all_classes/head"] <= 1


def test_one_more_fit_is_one_more_round_of_training() -> None:
    """What a device answers after its extra fit is what it would answer after one more local round."""
    after, _ = _run("local", local_test=0.25, measures=Measures(personal=("fit",)), test_samples=0)
    longer = Experiment(
        "local",
        "fashion_mnist_subset",
        Partition("iid", 3, only=240),
        Course(rounds=3, calibrate=False),
        "fedproto_mnist",
        16,
        local_test=0.25,
        test_samples=0,
        hyper={"lr": 0.02},
    )
    records = run_experiment(
        longer, data=shipped(), on_round=lambda r: None, on_device=lambda n, t: None, on_text=lambda text: None
    )
    assert after[-1].as_json()["personal"]["fit/head"] == records[-1].as_json()["local_test"]["head"]
    assert after[-1].all_classes == {}


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_few_test_images_are_the_same_few(method: str) -> None:
    few, _ = _run(method, test_samples=50)
    again, _ = _run(method, test_samples=50)
    assert few[-1].all_classes == again[-1].all_classes
    assert (few[-1].all_classes["head"] * 50 * 3) % 1 == pytest.approx(0, abs=1e-6)


def test_a_part_of_the_labels_is_enough_to_run() -> None:
    for method in ("fedproto", "fedavg"):
        whole, _ = _run(method)
        part, _ = _run(method, positive_rate=0.2)
        assert part[-1].loss != whole[-1].loss


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"method": "fedavg", "head": "frozen"}, "expected a method whose devices keep their weights, got fedavg"),
        ({"method": "fedproto", "head": "melted"}, "head, expected frozen, got melted"),
        ({"local_test": 1.0}, "--local-test, expected 0 up to 1, without 1, got 1.0"),
        ({"positive_rate": 0.0}, "--positive-rate, expected above 0, up to 1, got 0.0"),
        ({"test_samples": -1}, "--test-samples, expected 0 or more, got -1"),
        ({"trainer": "jax"}, "--trainer, expected onnx, kernels or torch, got jax"),
    ],
)
def test_wrong_options_are_one_line(given: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        Experiment(**{"method": "local", "data": "x", "partition": Partition(), "course": Course(), **given})


@pytest.mark.parametrize(("form_ms", "taken"), [(5.0, True), (20.0, False)])
def test_the_form_for_the_wheel_trains_where_its_trial_says_so(
    form_ms: float, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial alone is made up: it needs the wheel. The bundle is that of the run, and holds no further form."""
    trial = FormTrial("kernels", portable_ms=10.0, form_ms=form_ms, allowed=0.1)
    monkeypatch.setattr(experiments, "installed_kernels", lambda: True)
    monkeypatch.setattr(
        experiments, "choose_step_form", lambda bundle, path: choose_step_form(bundle, path, try_one=lambda form: trial)
    )
    given = Experiment("fedproto", "x", Partition(), Course(), "fedproto_mnist", 16, trainer="kernels")
    bundle = experiments._bundle(given, "fedproto_mnist", shipped(), tmp_path / "b.bundle")
    assert uses_kernels(bundle.train_step or b"") == taken
    assert not bundle.forms


def test_without_the_wheel_its_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "installed_kernels", lambda: None)
    with pytest.raises(UsageError, match="expected protofleet-kernels installed, got none"):
        Experiment("fedproto", "x", Partition(), Course(), trainer="kernels")


@pytest.mark.skipif(installed_kernels() is None, reason="needs protofleet-kernels: pip install ./kernels")
def test_a_run_with_the_wheel_is_that_without_it_but_for_rounding_and_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its form is taken without a trial: which form is faster here is no matter of this test."""
    trial = FormTrial("kernels", portable_ms=10.0, form_ms=5.0, allowed=0.1)
    monkeypatch.setattr(
        experiments, "choose_step_form", lambda bundle, path: choose_step_form(bundle, path, try_one=lambda form: trial)
    )
    (plain, _), (fast, _), (again, _) = (
        _run("fedproto", trainer=trainer, test_samples=60) for trainer in ("onnx", "kernels", "kernels")
    )
    assert [record.as_json() for record in fast] == [record.as_json() for record in again]
    assert [record.loss for record in fast] == pytest.approx([record.loss for record in plain], rel=1e-3)
    for name, share in plain[-1].as_json()["all_classes"].items():
        assert fast[-1].as_json()["all_classes"][name] == pytest.approx(share, abs=2 / 60), name  # two photos of 60
