"""The validation split: nothing of a test set is looked at, and a page says what its numbers are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab_samples import shipped, small_directory, some

from protofleet.contract.errors import UsageError
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.splits import held_out
from protofleet.lab.data.datasets import DataSet
from protofleet.lab.data.partition import Partition, hold_back, partition
from protofleet.lab.data.validation import SHARE, hold_back_for_validation, validation_split
from protofleet.lab.engine.deployed import Course, RoundRecord
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.engine.run_averaging import Measures
from protofleet.lab.paper_tables.config import read_table
from protofleet.lab.paper_tables.render import pages
from protofleet.lab.paper_tables.runner import Order, Progress, run_table
from protofleet.lab.paper_tables.table_ledger import sheet_of


def _data(test: LocalData | None = None) -> DataSet:
    """A few images; a test split that is None cannot be looked at without an error."""
    return replace(shipped(), train=some(shipped().train, 20), test=test)


def _run(method: str, data: DataSet, **given: object) -> RoundRecord:
    experiment = Experiment(
        method,
        "fashion_mnist_subset",
        Partition("iid", 2),
        Course(rounds=1, calibrate=False),
        "fedproto_mnist",
        16,
        **{"local_test": 0.2, "hyper": {"lr": 0.05} if method == "fedavg" else {}, **given},
    )
    quiet = {"on_round": lambda r: None, "on_device": lambda n, t: None, "on_text": lambda text: None}
    return run_experiment(experiment, data=data, **quiet)[-1]


@pytest.mark.parametrize("method", ["fedavg", "ncm"])
@pytest.mark.parametrize("test_samples", [None, 0])
def test_the_test_set_is_never_touched(method: str, test_samples: int | None) -> None:
    given = {"test_samples": test_samples, "validation": True, "measures": Measures(fresh=True)}
    found = _run(method, _data(), **given)
    assert bool(found.all_classes) == (test_samples is None)
    assert found.local_test
    garbage = some(shipped().test, 5)
    assert _run(method, _data(LocalData(garbage.x[::-1], garbage.y)), **given).as_json() == found.as_json()


def test_a_tenth_of_every_class_is_asked_about_and_nobody_trains_on_it() -> None:
    data = _data()
    found = validation_split(data)
    assert np.bincount(found.test.y).tolist() == [round(20 * SHARE)] * 10
    assert len(found.train) + len(found.test) == len(data.train)
    rows = {image.tobytes() for image in found.train.x}
    assert not rows & {image.tobytes() for image in found.test.x}
    assert validation_split(replace(data, name="the same")).test.x.tobytes() == found.test.x.tobytes()
    held = held_out(data.train.y, SHARE, 0)  # another draw would make a ledger's numbers others
    assert (data.train.x[held] == found.test.x).all()
    assert not validation_split(replace(data, sources=held.astype(np.int64))).sources.any(), "a source for each image"
    none = validation_split(data, ask=False)
    assert (len(none.test), none.train.x.tobytes()) == (0, data.train.x.tobytes())


def test_a_clients_own_test_is_taken_away_before_what_is_scored() -> None:
    for client, part in enumerate(partition(shipped().train.y, Partition("iid", 3, only=300), seed=4)):
        train, test = hold_back(part, 0.2, client)
        kept, scored = hold_back_for_validation(part, 0.2, client)
        assert (len(test), len(scored), len(kept)) == (20, 16, 64)
        assert set(kept) | set(scored) == set(train)
        assert not set(scored) & (set(kept) | set(test))


TABLE = """
title = "Why"
source = "ours"
found = ["H1: it is the cause."]
data = "fashion_mnist_subset"
metric = "all/head"
columns = [{ name = "IID" }]
[settings]
method = "fedavg"
backbone = "fedproto_mnist"
rounds = 1
clients = 2
[quick]
says = "the same"
[[rows]]
name = "chosen"
settings = { validation = true }
[[rows]]
name = "published"
published = { IID = 50.0 }
"""


def test_a_page_says_first_that_it_is_of_the_validation_split(tmp_path: Path) -> None:
    (path := tmp_path / "why.toml").write_text(TABLE)
    name, table = read_table(str(path))
    data = str(small_directory(tmp_path / "data", 12, 3))
    silent = Progress(lambda done, of, words: None, lambda words, record: None, lambda text: None)
    for quick in (False, True):
        order = Order(table, tmp_path / "out", data, quick=quick)
        cells = run_table(order, silent)
        assert [cell.resolved["validation"] for cell in cells] == [True, False]
        lines = pages(name, sheet_of(name, order, cells, "x"), table)[f"{name}.md"].splitlines()
        assert lines[2].startswith("**Of the validation split, the rows chosen: training images")
        only = pages(name, sheet_of(name, order, cells[:1], "x"), table)[f"{name}.md"].splitlines()
        assert only[2].startswith("**Of the validation split: training images")
        assert ("- H1: it is the cause." in only) == (not quick)


def test_what_is_published_does_not_stand_beside_it(tmp_path: Path) -> None:
    (path := tmp_path / "why.toml").write_text(TABLE.replace('"fedavg"', '"fedavg"\nvalidation = true'))
    with pytest.raises(UsageError, match="published, IID, expected no published number, or the test, got validation ="):
        read_table(str(path))
