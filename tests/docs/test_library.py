"""`import protofleet`: the public names, that they load nothing before they are used, what they do."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import TestBroker, make_broker
from commands import run, run_process
from edge_samples import FASHION_LABELS, fashion
from PIL import Image

import protofleet
from protofleet.aggregator.monitoring import events
from protofleet.contract.sums.statistics import ClassMeans

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs" / "library.md", ROOT / "README.md"
NAMES = {
    "Aggregator",
    "Bundle",
    "Device",
    "Event",
    "Predictor",
    "ProtofleetError",
    "Publisher",
    "RoundRecord",
    "__version__",
    "load_bundle",
    "simulate",
}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker("embedded", tmp_path)
    made.start()
    yield made
    made.stop()


def test_these_are_the_public_names():
    assert set(protofleet.__all__) == NAMES == set(dir(protofleet))
    assert all(getattr(protofleet, name) is not None for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'Predictorr'"):
        _ = protofleet.Predictorr


def test_importing_it_loads_nothing_and_a_device_no_torch():
    code = (
        "import sys, protofleet; assert not {'numpy', 'onnxruntime', 'torch', 'typer'} & set(sys.modules); "
        "protofleet.Device, protofleet.Predictor, protofleet.Aggregator, protofleet.load_bundle; "
        "protofleet.ProtofleetError; "
        "assert not {'torch', 'onnx', 'typer', 'rich'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_package_says_that_it_is_typed():
    assert (Path(protofleet.__file__).parent / "py.typed").exists()


def test_the_pages_examples_use_public_names_only():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 10
    used = set()
    for block in blocks:
        compile(block, "library.md", "exec")
        used |= set(re.findall(r"protofleet\.(\w+)", block))
    assert used - {"contract"} <= NAMES  # a method's base class: it is extended, and not promised
    assert {name for name in NAMES if name in DOCS.read_text()} >= NAMES - {"Bundle", "Event", "RoundRecord"}


def test_an_aggregation_of_ones_own_merges_as_the_page_says(tmp_path: Path):
    """Run by `lab compare`, from the block as it stands; and against plain numbers."""
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "Capped" in each)
    (tmp_path / "capped.py").write_text(block)
    small = ("--samples", "120", "--clients", "2", "--rounds", "1", "--jobs", "1", "--seeds", "1")
    done = run_process("lab", "compare", "fedproto,capped:Capped", *small, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("capped ") for line in done.stdout.splitlines())
    names: dict[str, Any] = {}
    exec(compile(block, "capped.py", "exec"), names)
    many = ClassMeans.from_means(np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([80, 0]))
    few = ClassMeans.from_means(np.array([[0.0, 1.0], [2.0, 2.0]]), np.array([5, 5]))
    merged = names["Capped"]().merge(lambda: [many, few], "mean", {})
    np.testing.assert_allclose(merged.means, [[0.8, 0.2], [2.0, 2.0]])
    assert merged.counts.tolist() == [85, 5]


def test_a_fleet_in_one_program(broker: TestBroker, lab_bundle: Callable[..., Path], tmp_path: Path):
    """Two devices with arrays in memory, an aggregator, all in threads of this process."""
    path = lab_bundle(epochs=1)
    bundle = protofleet.load_bundle(path)
    heard: list[protofleet.Event] = []
    summaries: list[int] = []
    aggregator = protofleet.Aggregator(path, broker=broker.url, store=tmp_path / "s.sqlite", rounds=1, min_clients=2)
    done: dict[str, object] = {}

    def take_part(name: str, seed: int) -> None:
        data = fashion(bundle, 40, (0, 1, 2), seed=seed)
        device = protofleet.Device(
            path, broker=broker.url, id=name, data=(data.x, data.y), state=tmp_path / name, patience=30
        )
        done[name] = device.run()

    threads = [threading.Thread(target=take_part, args=each) for each in (("a", 1), ("b", 2))]
    for thread in threads:
        thread.start()
    summary = aggregator.run(heard.append, lambda content: summaries.append(len(content["rounds"])))
    for thread in threads:
        thread.join(60)
    assert summary["finished"]
    assert summary["totals"]["committed"] == 4  # a round of FedProto and one of FFC
    assert [event.method for event in heard if isinstance(event, events.RoundClosed)] == ["fedproto", "ffc"]
    assert summaries[-1] == 2
    assert {name: found["contributions"]["committed"] for name, found in done.items()} == {"a": 2, "b": 2}


def test_the_example_of_the_readme_is_run(broker: TestBroker, lab_bundle: Callable[..., Path], tmp_path: Path):
    """As it stands, in the folder of a user, but for the broker's port."""
    (tmp_path / "fleet.bundle").symlink_to(lab_bundle(method="ncm"))
    data = fashion(protofleet.load_bundle(tmp_path / "fleet.bundle"), 20, (1, 2))
    for number, (image, label) in enumerate(zip(data.x, data.y, strict=True)):
        folder = tmp_path / "photos" / FASHION_LABELS[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / f"{number}.png")
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    first = next((tmp_path / "photos").rglob("*.png"))
    block = block.replace("mqtt://127.0.0.1", broker.url).replace("photos/cat/1.jpg", str(first.relative_to(tmp_path)))
    assert len(block.splitlines()) == 6
    path = tmp_path / "fleet.bundle"
    aggregator = protofleet.Aggregator(path, broker=broker.url, store=tmp_path / "s.sqlite", rounds=1, min_clients=1)
    running = threading.Thread(target=aggregator.run, daemon=True)
    running.start()
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    aggregator.stop()
    assert done.returncode == 0, done.stderr
    committed, answer = done.stdout.splitlines()
    assert committed == "1"
    assert answer in [f"1.jpg {label}" for label in FASHION_LABELS]


def test_both_are_stopped_from_another_thread_and_go_on(
    broker: TestBroker, lab_bundle: Callable[..., Path], tmp_path: Path
):
    path = lab_bundle(epochs=1)
    data = fashion(protofleet.load_bundle(path), 20, (0, 1))
    aggregator = protofleet.Aggregator(path, broker=broker.url, store=tmp_path / "s.sqlite", rounds=1, min_clients=5)
    device = protofleet.Device(path, broker=broker.url, id="a", data=(data.x, data.y), state=tmp_path / "a")
    ended: dict[str, dict[str, object]] = {}
    online = threading.Event()

    def on_event(event: protofleet.Event) -> None:
        if isinstance(event, events.Waiting) and event.online == 1:
            online.set()

    threads = [
        threading.Thread(target=lambda: ended.update(aggregator=aggregator.run(on_event))),
        threading.Thread(target=lambda: ended.update(device=device.run())),
    ]
    for thread in threads:
        thread.start()
    assert online.wait(60)
    device.stop()
    aggregator.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert ended["aggregator"]["finished"] is False
    again = protofleet.Aggregator(path, broker=broker.url, store=tmp_path / "s.sqlite", rounds=1, min_clients=5)
    again.stop()
    assert again.run()["run"] == ended["aggregator"]["run"]


def test_what_is_wrong_is_one_line(lab_bundle: Callable[..., Path], tmp_path: Path):
    path = lab_bundle()
    with pytest.raises(
        protofleet.ProtofleetError, match="--rule, expected mean, median or trimmed-mean, got meen, try one of mean"
    ):
        protofleet.Aggregator(path, broker="mqtt://h", store=tmp_path / "s", rule="meen")
    with pytest.raises(protofleet.ProtofleetError, match="--id"):
        protofleet.Device(path, broker="mqtt://h", id="A/B", data="photos", state=tmp_path / "a")
    data = fashion(protofleet.load_bundle(path), 20, (0, 1))
    wrong = protofleet.Device(path, broker="mqtt://h", id="a", data=(data.x[:, :9], data.y), state=tmp_path / "a")
    with pytest.raises(protofleet.ProtofleetError, match=r"the arrays: x, expected \(N, 28, 28, 1\)"):
        wrong.run()


def test_a_federation_in_one_call():
    seen = []
    records = protofleet.simulate(
        "fedproto", clients=2, rounds=1, samples=60, backbone="fedproto_mnist", test_samples=20, on_round=seen.append
    )
    assert seen == records
    assert [record.method for record in records] == ["fedproto", "ffc"]
    assert 0 <= records[-1].all_classes["linear"] <= 1


def test_what_trains_nothing_has_one_round_unless_another_number_is_named(tmp_path: Path):
    given = {"clients": 2, "samples": 60, "backbone": "fedproto_mnist", "test_samples": 20}
    assert [record.method for record in protofleet.simulate("ncm", **given)] == ["ncm"]
    words = ["--clients", 2, "--samples", 60, "--backbone", "fedproto_mnist", "--evaluate-every", 5]
    done = run("lab", "run", "--jobs", "1", "--method", "fedcof", *words, "--json", tmp_path / "rounds.jsonl")
    assert (done.returncode, len((tmp_path / "rounds.jsonl").read_text().splitlines())) == (0, 1)
