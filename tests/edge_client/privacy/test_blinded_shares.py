"""What a device makes of a blinded round, from its photos to its outbox."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blinded_samples import KEY, PUBLIC, signer
from edge_samples import RUN, announcement, fashion, releases

import protofleet
from protofleet.aggregator.ingest.blinded_shares import ShareTerms
from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.contract.bundle.bundle_file import Bundle, extractor_of, read_bundle
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.identity.signatures import inside
from protofleet.contract.methods import method
from protofleet.contract.privacy.blinding import SCALE_BITS, add_pad, statistic_of
from protofleet.contract.privacy.sealing import unseal
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution, HelperTerms, SealedSeed
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.rounds.round_follower import Follower, Task
from protofleet.edge_client.run.round_work import Line, Own, RoundWork

LEAST, SAMPLES = 3, 12


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(Path(protofleet.__file__).parent.parent / "lab" / "demo" / "shipped" / "fleet.bundle")


def blinding(bundle: Bundle) -> Blinding:
    return Blinding(bundle.manifest, fleet="fleet", device="pi-1", helper=PUBLIC, signer=signer("pi-1"))


def announced(bundle: Bundle, least: int = LEAST) -> Announcement:
    m = bundle.manifest
    told = {"extractor": extractor_of(m, bundle.sha256, method("ffc")), "class_lists": (list_digest(m.labels),)}
    return announcement(bundle, 1, "ffc", helper=HelperTerms(PUBLIC.seal, least, SCALE_BITS), **told)


def left_by(bundle: Bundle, folder: Path, a: Announcement, policy: Policy | None = None) -> bytes:
    """What a device has in its journal, to be sent, after a round."""
    with Journal(folder, fleet="fleet", device="pi-1", bundle=bundle.sha256) as journal:
        device = Device(bundle, fashion(bundle, SAMPLES, (0, 3)), "pi-1")
        follower = Follower("pi-1", bundle, is_done=journal.is_done, took_part=journal.took_part)
        work = RoundWork(
            Own(device, releases(folder, bundle, policy), blinding(bundle), photos="photos"),
            Line(journal, Outbox(random.Random(0)), follower, "pi-1", 1),
            manager=ServiceManager({}),
        )
        work.take_part(Task(a, GlobalState(RUN, 0, 0)))
        (pending,) = journal.pending()
    return pending.payload


def made(bundle: Bundle, folder: Path, a: Announcement) -> FeatureGram:
    """What a device's share of a round, and its pad, come to together."""
    message = decode(left_by(bundle, folder, a))
    assert isinstance(message, Contribution)
    assert message.share is not None
    seed = inside(message.seed)
    assert isinstance(seed, SealedSeed)
    words = np.array(message.share)
    add_pad(words, unseal(KEY, "fleet", "pi-1", seed))
    found = statistic_of(FeatureGram, bundle.manifest.classes, bundle.manifest.features, words)
    assert isinstance(found, FeatureGram)
    return found


def test_a_share_and_its_pad_are_the_devices_sums(bundle: Bundle, tmp_path: Path) -> None:
    found = made(bundle, tmp_path, announced(bundle))
    assert found.counts.sum() == SAMPLES
    width = bundle.manifest.features
    assert found.matrix.trace() == pytest.approx(SAMPLES, abs=width * 2.0 ** -(SCALE_BITS + 1) + 1e-5)


def test_numbers_too_large_to_be_summed_are_abstained_from_in_one_line(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(
        "protofleet.contract.privacy.blinding.LARGEST", float(SAMPLES) / 4
    )  # as 131,072 samples are too many
    message = inside(left_by(bundle, tmp_path, announced(bundle)))
    assert isinstance(message, Contribution)
    assert message.says_nothing
    assert sum("is refused: " in line and "expected numbers below 3" in line for line in said) == 1


def test_a_round_that_the_policy_refuses_is_abstained_from_and_left_as_it_is(bundle: Bundle, tmp_path: Path) -> None:
    pending = left_by(bundle, tmp_path, announced(bundle), Policy(methods=("ncm",)))
    message = inside(pending)
    assert isinstance(message, Contribution)
    assert message.says_nothing
    terms = Terms(extractor=announced(bundle).extractor, blinded=ShareTerms(1, LEAST, bytes(32)))
    m = bundle.manifest
    check_content(message, terms, bundles=(bundle.sha256,), classes=m.classes, width=m.features)
    assert blinding(bundle).permits(pending)


def test_a_sum_of_fewer_samples_than_features_is_warned_of_and_one_of_more_is_not(bundle: Bundle) -> None:
    width, each = bundle.manifest.features, blinding(bundle)
    assert "fewer than the" in each.warning(announced(bundle), (width - 1) // LEAST)
    assert not each.warning(announced(bundle), -(-width // LEAST))
    assert not each.warning(replace(announced(bundle), method="ncm"), 1)
    assert not each.warning(replace(announced(bundle), helper=None), 1)
