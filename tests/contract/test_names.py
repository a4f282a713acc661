"""Every table of names refuses an unknown one in the same words, with the nearest, wherever it is used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from protofleet.aggregator.screening.outliers import SUSPECTS, screen
from protofleet.aggregator.settings import Settings
from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.address import TRANSPORTS, Address
from protofleet.contract.names import known, listed, named
from protofleet.contract.sums.merge_rules import RULES, WEIGHTINGS, merge
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.encodings import ENCODINGS, SUMS_FORMS
from protofleet.contract.wire.messages import ClassRows, GlobalPart
from protofleet.edge_client.hardware.providers import PROVIDERS, wanted_trials
from protofleet.edge_client.training.onnx_session import Provider
from protofleet.hw_profiles.accelerator.simulate import Array
from protofleet.hw_profiles.accelerator.systolic import DEPTHWISE, map_gemm
from protofleet.hw_profiles.latency.precisions import ON_ARRAYS
from protofleet.hw_profiles.workload.model import Gemm
from protofleet.lab.data.partition import PARTITIONS, Partition
from protofleet.lab.workers.engines import ENGINES, open_workers

SUMS = ClassMeans(np.ones((2, 3)), np.ones(2, np.int64))


def _encode(name: str) -> None:
    rows = ClassRows(np.zeros(1, np.uint16), np.ones((1, 3)))
    encode(GlobalPart(bytes(4), 1, 1, 0, 1, "prototypes", rows), name)


def _engine(name: str) -> None:
    with open_workers(name):
        pass


UNKNOWN: dict[str, tuple[Callable[[str], object], object, str, str]] = {
    "provider": (lambda name: Provider(name).settings(1), PROVIDERS, "cude", "cuda"),
    "trials": (lambda name: wanted_trials(name, ()), PROVIDERS, "xnnpak", "xnnpack"),
    "transport": (lambda name: Address("h", 1, name), TRANSPORTS, "mqts", "mqtts"),
    "rule": (lambda name: merge(lambda: [SUMS], name), RULES, "medain", "median"),
    "weighting": (lambda name: merge(lambda: [SUMS], "mean", name), WEIGHTINGS, "shared", "share"),
    "suspects": (lambda name: screen(list, {}, suspects=name), SUSPECTS, "ignored", "ignore"),
    "--encoding": (lambda name: Settings(encoding=name), ENCODINGS, "f31", "f32"),
    "--sums-encoding": (lambda name: Settings(sums_encoding=name), SUMS_FORMS, "int8", "int32"),
    "encoding": (_encode, ENCODINGS, "f61", "f64"),
    "partition": (Partition, PARTITIONS, "shot", "shots"),
    "--engine": (_engine, ENGINES, "rey", "ray"),
    "precision": (lambda name: Array(precision=name), ON_ARRAYS, "fp33", "fp32"),
    "depthwise": (lambda name: map_gemm(Gemm(1, 1, 1), depthwise=name), DEPTHWISE, "paked", "packed"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_name_is_refused_from_python_with_the_nearest(what: str) -> None:
    use, table, wrong, near = UNKNOWN[what]
    with pytest.raises(UsageError) as caught:
        use(wrong)
    assert (caught.value.expected, caught.value.got) == (listed(table), wrong)  # type: ignore[arg-type]
    assert str(caught.value.hint).startswith("one of ")
    assert near in str(caught.value.hint)


def test_a_table_gives_what_stands_under_a_name() -> None:
    table = {"a": 1, "b": 2}
    assert (known(table, "b", "x"), named(table, "b", "x")) == ("b", 2)
    assert (listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])) == ("a", "a or b", "a, b or c")
    with pytest.raises(UsageError, match=r"^x, expected a or b, got 5, try one of a, b$"):
        known(table, 5, "x")  # type: ignore[arg-type]
