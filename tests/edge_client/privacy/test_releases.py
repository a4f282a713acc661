"""Blinded and noised rounds of a device: what its policy refuses of them, and what its ledger has of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blinded_samples import PUBLIC, signer
from edge_samples import RUN, announcement, fashion, graphs_of, releases

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import StoreError
from protofleet.contract.methods import method
from protofleet.contract.privacy import blinding
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution, HelperTerms
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.privacy.accountant import cost_of
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.ledger import Cost
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.rounds.round_follower import Task
from tests.edge_client.privacy.test_policy import FEW, journal_in, task, work


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle())


# ── a blinded round ─────────────────────────────────────────────────────────────────────────────────────────────────


def blinded_task(bundle: Bundle, number: int = 1, **fields: object) -> Task:
    terms = {"helper": HelperTerms(PUBLIC.seal, 2, 36), "extractor": bytes(32), "encoding": "f64"}
    return task(bundle, number, method="ncm", **{**terms, **fields})


def blinding_of(bundle: Bundle) -> Blinding:
    return Blinding(bundle.manifest, fleet="fleet", device="pi-1", helper=PUBLIC, signer=signer("pi-1"))


@pytest.mark.parametrize(
    ("policy", "fields", "word"),
    [
        (Policy(methods=("ffc",)), {}, "method ncm"),
        (Policy(encodings=("f32",)), {}, "encoding f64"),
        (Policy(statistics=("feature-gram",)), {}, "statistic unit-means"),
        (Policy(min_samples=2), {}, "blinded"),  # it would show who has how many
        (Policy(), {"helper": None}, "not blinded"),
        (Policy(), {"helper": HelperTerms(bytes(32), 2, 36)}, "blinded"),
        (Policy(epsilon=4.0, delta=1e-6), {}, "no epsilon"),
        (Policy(blinded=True), {}, ""),
        (Policy(), {}, ""),
    ],
)
def test_a_blinded_round_that_is_refused_is_answered_with_nothing_and_another_with_a_share(
    policy: Policy, fields: dict[str, object], word: str, bundle: Bundle, tmp_path: Path
) -> None:
    found = releases(tmp_path, bundle, policy)
    with journal_in(tmp_path / "state", bundle) as journal:
        done = work(bundle, journal, found, blinding=blinding_of(bundle))
        done.take_part(blinded_task(bundle, **fields))
        (waits,) = journal.pending()
    sent, kept = decode(waits.payload), found._ledger.newest("fleet", *waits.key)
    assert isinstance(sent, Contribution)
    assert kept is not None
    assert done.refused == (f"round 1 (ncm): {word}" if word else "")
    assert (sent.says_nothing, sent.share is None, kept.what) == (
        bool(word),
        bool(word),
        "sat-out" if word else "blinded",
    )
    assert (kept.cost == Cost(0.0, 0.0)) == bool(word)  # no ε holds of sums without noise
    if word:
        assert len(waits.payload) < 200


def test_a_blinded_release_is_in_the_ledger_once_however_often_it_is_shared_anew(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power goes before the journal has it, and later the state directory is an older copy: other shares, of the
    same sums. Its rate counts it, too."""

    def off(self: Journal, *args: object, **named: object) -> None:
        raise StoreError("the power is off")

    found, shares = releases(tmp_path, bundle), list[bytes]()
    with journal_in(tmp_path / "first", bundle) as journal, monkeypatch.context() as patch:
        patch.setattr(Journal, "commit_round", off)
        with pytest.raises(StoreError):
            work(bundle, journal, found, blinding=blinding_of(bundle)).take_part(blinded_task(bundle))
    for folder in ("first", "an older copy"):
        with journal_in(tmp_path / folder, bundle) as journal:
            work(bundle, journal, found, blinding=blinding_of(bundle)).take_part(blinded_task(bundle))
            shares.append(journal.pending()[0].payload)
    assert shares[0] != shares[1]
    spent = found._ledger.spent()
    assert (spent.releases, spent.bare_add_remove) == (1, 1)
    found.policy = Policy(releases_per_day=1.0)
    refused = found.refusal(blinded_task(bundle, 2).announcement, FEW)
    assert refused is not None
    assert refused.word == "releases per day"


def test_numbers_that_are_too_large_to_be_blinded_stay_and_the_client_goes_on(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blinding, "LARGEST", 1.0)
    found = releases(tmp_path, bundle)
    with journal_in(tmp_path / "state", bundle) as journal:
        done = work(bundle, journal, found, blinding=blinding_of(bundle))
        done.take_part(blinded_task(bundle))
        sent = decode(journal.pending()[0].payload)
    assert isinstance(sent, Contribution)
    assert sent.says_nothing
    assert done.refused == "round 1 (ncm): too large to be blinded"
    assert not found._ledger.has_release("fleet", RUN, 1, "ncm")


# ── a noised round ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_noised_round_is_released_once_whatever_became_of_it(bundle: Bundle, tmp_path: Path) -> None:
    """A state directory that is an older copy, with the photos as they were or one fewer: had it another answer,
    whoever announces a round twice would see which. Nor do noised sums stand."""
    data, found, sent = fashion(bundle, 12, (0, 3)), releases(tmp_path, bundle), list[bytes]()
    for copy, count in (("first", 12), ("an older copy", 12), ("an older copy again", 11)):
        with journal_in(tmp_path / copy, bundle) as journal:
            device = Device(
                bundle,
                replace(data, x=data.x[:count], y=data.y[:count]),
                "pi-1",
                secret=bytes(32),
                graphs=graphs_of(bundle),
            )
            done = work(bundle, journal, found, device)
            done.take_part(task(bundle, 1, method="ncm-dp"))
            sent.append(journal.pending()[0].payload)
    assert sent[0] != sent[1] == sent[2]
    assert done.refused == "round 1 (ncm-dp): released already"
    mechanism = method("ncm-dp").mechanism(method("ncm-dp").resolve({}))
    assert found._ledger.spent().add_remove == cost_of(mechanism, FEW).add_remove
    assert found.refusal(announcement(bundle, 2, "ncm-dp"), FEW) is None
    refused = found.refusal(announcement(bundle, 2, "ncm-dp", phase="standing"), FEW)
    assert refused is not None
    assert refused.word == "standing"


@pytest.mark.parametrize("name", ["ffc", "ffc-dp", "ncm-dp"])
def test_what_says_nothing_is_small_and_merges_as_a_statistic_of_no_samples(name: str, bundle: Bundle) -> None:
    """FFC's triangle of zeros would be megabytes."""
    found = method(name)
    width = found.row_width(found.resolved_in(bundle.manifest.hyper), bundle.manifest.features)
    asked = announcement(bundle, method=name)
    device = Device(bundle, fashion(bundle, 12, (0, 3)), "pi-1", graphs=graphs_of(bundle))
    payload = encode(device.abstain(asked).contribution, "f32")
    sent = decode(payload)
    assert isinstance(sent, Contribution)
    assert len(payload) < 100
    statistic = sent.statistic(found.statistic, 10, width)
    assert not any(array.any() for array in (*statistic.arrays(), statistic.counts))
