"""Noised sums as a device sends them: every class, whatever it has; the same bytes again, and never one noise twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from edge_samples import announcement, fashion

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.methods import method
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Contribution
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.extractor import Extractor

SECRET = bytes(32)
NAMES = ("ffc-dp", "ncm-dp")
SIZES = -1  # the last field of rows


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    """What trains nothing runs on it, whatever its method."""
    return read_bundle(mnist_like_bundle("ncm"))


@pytest.fixture(scope="module")
def data(bundle: Bundle) -> LocalData:
    return fashion(bundle, 24, (0, 3))


def sent(bundle: Bundle, data: LocalData, asked: Announcement, secret: bytes = SECRET) -> Contribution:
    return Device(bundle, data, "pi-1", secret=secret).run_round(asked, None).contribution


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 24])
def test_neither_classes_nor_counts_nor_bytes_tell_what_a_device_has(name: str, count: int, bundle, data) -> None:
    """Nor does a threshold act before the noise: one photo of a class is in the sums of a fleet that asks for five."""
    some = LocalData(data.x[:count], data.y[:count])
    asked = announcement(bundle, method=name, min_samples=5)
    message, whole = sent(bundle, some, asked), sent(bundle, data, asked)
    assert message.body.classes.tolist() == list(range(10))
    assert set(message.counts.tolist()) == {1}
    assert len(encode(message, "f32")) == len(encode(whole, "f32"))
    if count == 1:
        none = sent(bundle, LocalData(data.x[:0], data.y[:0]), asked)
        assert np.abs(message.body.rows - none.body.rows).min() > 0


@pytest.mark.parametrize("name", NAMES)
def test_photos_that_cannot_be_read_are_not_told_of(name: str, bundle, data) -> None:
    """What is sent is what a device without photos sends, with noise like any other."""
    asked, none = announcement(bundle, method=name), LocalData(data.x[:0], data.y[:0])
    unread = Device(bundle, data, "pi-1", secret=SECRET).unread(asked).contribution
    assert encode(unread, "f64") == encode(sent(bundle, none, asked), "f64")
    assert len(encode(unread, "f32")) == len(encode(sent(bundle, data, asked), "f32"))


def test_a_class_that_was_forgotten_is_left_out_by_its_number_and_not_for_what_there_is(bundle, data) -> None:
    for withheld in ((3,), (7,)):
        message = sent(bundle, data, announcement(bundle, method="ffc-dp", withheld=withheld))
        assert message.body.classes.tolist() == [number for number in range(10) if number not in withheld]


@pytest.mark.parametrize("name", NAMES)
def test_one_noise_is_never_used_twice(name: str, bundle, data) -> None:
    """Whatever differs, the photos above all, noise differs everywhere, so that subtracting shows nothing."""
    asked = announcement(bundle, method=name)
    first = sent(bundle, data, asked)
    assert encode(sent(bundle, data, asked), "f64") == encode(first, "f64")
    fewer = LocalData(data.x[:-1], data.y[:-1])
    other = {
        "photos": sent(bundle, fewer, asked),
        "round": sent(bundle, data, announcement(bundle, 2, method=name)),
        "run": sent(bundle, data, replace(asked, run=b"run2")),
        "secret": sent(bundle, data, asked, bytes([1]) * 32),
        "bundle": sent(replace(bundle, sha256=bytes(32)), data, replace(asked, bundle=bytes(32))),
    }
    for what, message in other.items():
        moved = message.further[SIZES][:, 0] - first.further[SIZES][:, 0]
        assert np.abs(moved - np.rint(moved)).max() > 1e-3, what
        assert np.abs(message.body.rows - first.body.rows).min() > 0, what


def test_two_methods_of_one_round_have_noise_of_their_own(bundle, data) -> None:
    one, other = (sent(bundle, data, announcement(bundle, method=name)) for name in NAMES)
    noises = []
    for message, name in ((one, "ffc-dp"), (other, "ncm-dp")):
        deviation = method(name).mechanism(method(name).resolve({})).count_deviation
        noises.append((message.further[SIZES][:, 0] - np.bincount(data.y, minlength=10)) / deviation)
    assert np.abs(noises[0] - noises[1]).min() > 1e-3


def test_a_photos_feature_is_the_same_alone_and_among_others(bundle: Bundle, data: LocalData) -> None:
    """The guarantee needs it: one photo more must not change what is summed of the others."""
    extractor = Extractor(bundle, bundle.params)
    together = extractor.features(data.x)
    for start in (0, 1, 5):
        np.testing.assert_array_equal(extractor.features(data.x[start:]), together[start:])
    np.testing.assert_array_equal(extractor.features(data.x[7:8]), together[7:8])


@pytest.mark.parametrize("name", NAMES)
def test_without_noise_to_speak_of_it_answers_like_the_method_without(name: str, bundle, data) -> None:
    found, plain = method(name), method(name.removesuffix("-dp"))
    answers = []
    for each, hyper in ((found, {"noise_multiplier": 1e-3}), (plain, {})):
        settled = each.resolve({**hyper, **({"ridge": 10.0} if name == "ffc-dp" else {})})
        own = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, hyper=settled))
        statistic = Device(own, data, "pi-1", secret=SECRET)._summarise(each, announcement(own, method=each.name))
        rows = each.next_rows({}, each.merge(lambda made=statistic: [made], "mean", settled), settled)
        answers.append(next(iter(rows.values())))
    noised, exact = answers
    here = np.isin(noised.classes, exact.classes)  # of two in a hundred classes noise alone looks like samples
    assert noised.classes[here].tolist() == exact.classes.tolist() == [0, 3]
    np.testing.assert_allclose(noised.rows[here], exact.rows, atol=0.05 * np.abs(exact.rows).max())
