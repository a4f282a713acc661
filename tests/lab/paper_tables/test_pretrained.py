"""The table from a pretrained backbone: what it says of its weights, and the network that stands in."""

from __future__ import annotations

from protofleet.contract.methods import method
from protofleet.lab.paper_tables.config import read_table

_, TABLE = read_table("pretrained-methods")


def test_the_table_says_where_its_weights_come_from_and_that_it_is_a_stand_in() -> None:
    assert TABLE.settings.weights == "efficientnet-lite0.safetensors"
    assert TABLE.settings.backbone == "pretrained_backbone:last_block"
    assert "stand-in" in TABLE.source
    assert "benchmarks/heads/pretrained_backbone.py" in TABLE.needs


def test_what_trains_is_held_to_a_tenth_of_its_methods_rate_and_the_rest_to_its_defaults() -> None:
    for row in TABLE.rows:
        settings = TABLE.settings_of(row, TABLE.columns[0], quick=False)
        name = "fedproto" if settings.method == "local" else str(settings.method)
        found = method(name)
        if found.trains:
            assert settings.hyper["lr"] == float(found.hyper["lr"].default) / 10
        else:
            assert settings.hyper == {}
            assert settings.rounds == 1
