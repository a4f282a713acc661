"""What an update keeps and takes is that of the optimizer which its hyper-parameters name."""

from __future__ import annotations

import pytest

from protofleet.contract.errors import UsageError
from protofleet.contract.methods.optimizers import OPTIMIZERS, Update


def test_each_optimizer_keeps_what_its_step_reads() -> None:
    plain, momentum = Update.of({"lr": 0.1}), Update.of({"momentum": 0.9, "weight_decay": 1e-4})
    assert (plain.rule.kept, plain.rule.steps, plain.operations) == ((), None, 2)
    assert (momentum.rule.kept, momentum.rule.steps, momentum.operations) == (("momentum",), None, 6)
    adam = Update.of({"optimizer": "adam", "momentum": 0.9})
    assert (adam.rule.kept, adam.rule.steps, adam.operations) == (("adam.mean", "adam.square"), "adam.steps", 16)
    assert adam.momentum == 0.0, "FedNova would correct for it"


def test_an_unknown_optimizer_is_named_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="optimizer, expected sgd or adam, got sgdm"):
        assert Update("sgdm").rule
    assert list(OPTIMIZERS) == ["sgd", "adam"]
