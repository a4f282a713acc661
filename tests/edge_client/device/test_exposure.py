"""What a device tells its owner of single photos in what it sends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edge_samples import RUN

from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import METHODS
from protofleet.contract.wire.messages import Announcement, Contribution, HelperTerms
from protofleet.edge_client.device.exposure import exposed

CLASSES, WIDTH = 3, 32
ASKED = Announcement(RUN, 1, "open", "ncm", bytes(32))
BLINDED = replace(ASKED, method="ffc", helper=HelperTerms(bytes(32), 4, 36))


def told(method: str, counts: tuple[int, ...], asked: Announcement = ASKED, **hyper: float) -> str:
    found, labels = METHODS[method], np.repeat(np.arange(CLASSES), counts)
    z = unit_rows(np.random.default_rng(0).random((len(labels), WIDTH)))
    statistic = found.statistic.of(z, labels, CLASSES)  # type: ignore[attr-defined]
    sent = Contribution.of(statistic, run=RUN, round=1, method=method, bundle=bytes(32), extractor=bytes(32))
    return exposed(sent, replace(asked, method=method), found, found.resolve(hyper), WIDTH)


@pytest.mark.parametrize(
    ("method", "counts", "asked", "words"),
    [
        ("ncm", (20, 2, 0), ASKED, ""),
        ("ncm", (20, 1, 1), ASKED, "2 rows of one photo alone"),
        ("ncm", (20, 2, 2), replace(ASKED, phase="standing"), "comes or goes alone between two sums"),
        ("ncm", (20, 2, 2), replace(ASKED, phase="standing", min_samples=2), ""),
        ("ffc", (20, 10, 2), ASKED, ""),
        ("ffc", (20, 9, 2), ASKED, "31 samples: of fewer than 32 FFC's matrix can show who is in it"),
        ("ffc", (5, 1, 2), BLINDED, ""),
    ],
)
def test_an_owner_is_told_where_single_photos_show(method, counts, asked, words):
    found = told(method, counts, asked)
    assert words in found if words else not found


def test_of_noised_sums_and_of_none_nothing_is_told():
    noised, hyper = METHODS["ncm-dp"], {"noise_multiplier": 1.0, "count_share": 0.05}
    lone = np.array([0, 0, 1])
    sums = METHODS["ncm"].statistic.of(np.eye(3, WIDTH), lone, CLASSES)  # type: ignore[attr-defined]
    for statistic, found in ((sums, noised), (sums.zero(CLASSES, WIDTH), METHODS["ncm"])):
        sent = Contribution.of(statistic, run=RUN, round=1, method="ncm", bundle=bytes(32), extractor=bytes(32))
        assert exposed(sent, ASKED, found, hyper, WIDTH) == ""
