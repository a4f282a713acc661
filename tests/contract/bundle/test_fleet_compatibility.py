"""Bundles that may be one fleet and those that may not; the random projection that a fleet agrees on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from contract_samples import small_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.fleet_compatibility import check_fleet
from protofleet.contract.errors import BundleError, MethodError
from protofleet.contract.heads.sphere import projection
from protofleet.contract.methods import method

ANCHORS = "prototypes.anchors"


def _bundle(
    number: int = 1, name: str = "fedproto", *, hyper: dict | None = None, anchors: np.ndarray | None = None, **changes
) -> tuple[Path, Bundle]:
    """A bundle of a fleet of three classes and width 2; `number` is all that tells its bytes from another's."""
    manifest = small_parts()["manifest"]
    settled = method(name).resolve(hyper or {})
    made = msgspec.structs.replace(manifest, method=name, hyper=settled, **changes)
    params = {} if anchors is None else {ANCHORS: anchors}
    return Path(f"b{number}.bundle"), Bundle(made, bytes([number]) * 32, b"features", None, params)


def test_what_is_each_devices_own_may_differ() -> None:
    other = _bundle(
        2,
        backbone="another",
        input_shape=(8, 8, 3),
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        batch=32,
        hyper={"lr": 0.3, "epochs": 4, "lambda": 0.2, "momentum": 0.0},
    )
    check_fleet([_bundle(1), other, _bundle(3)])


@pytest.mark.parametrize(
    ("first", "other", "line"),
    [
        ({}, {"name": "fedpr"}, "another method than the fleet's first bundle, expected fedproto, got fedpr"),
        ({}, {"labels": ("cat", "dog")}, "another number of classes .*, expected 3, got 2"),
        ({}, {"labels": ("cat", "bird", "dog")}, "class 1 is another than in b1.bundle, expected dog, got bird"),
        ({}, {"features": 3}, "another feature width .*, expected 2, got 3"),
        ({}, {"hyper": {"aggregation": "client"}}, "another weighting .*, expected count, got client"),
        (
            {"name": "spherefed", "hyper": {"project": 1}},
            {"name": "spherefed", "hyper": {"project": 1, "project_seed": 9}},
            "another project_seed than the fleet's first bundle, expected 0, got 9",
        ),
        (
            {"name": "spherefed"},
            {"name": "spherefed", "hyper": {"project": 1}},
            "another project .*, expected 0, got 1",
        ),
        (
            {"name": "spherefed"},
            {"name": "spherefed", "hyper": {"ridge": 0.1}},
            "another ridge .*, expected auto, got 0.1",
        ),
        (
            {"name": "fedhkd"},
            {"name": "fedhkd", "hyper": {"temperature": 2}},
            "another temperature .*, expected 0.5, got 2",
        ),
        (
            {"name": "fedhp", "anchors": np.eye(3, 2)},
            {"name": "fedhp", "anchors": -np.eye(3, 2)},
            "b2.bundle: other prototypes.anchors, expected the first bundle's, got others, try one --seed",
        ),
        ({"name": "fedhp", "anchors": np.eye(3, 2)}, {"name": "fedhp"}, "b2.bundle: other prototypes.anchors"),
    ],
)
def test_a_difference_is_refused_in_one_line_that_names_the_bundle(first: dict, other: dict, line: str) -> None:
    with pytest.raises(BundleError, match=f"^b2.bundle.*{line}|^{line}") as caught:
        check_fleet([_bundle(1, **first), _bundle(2, **other)])
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_third_is_held_against_the_first_too() -> None:
    with pytest.raises(BundleError, match=r"b3.bundle: another feature width"):
        check_fleet([_bundle(1), _bundle(2), _bundle(3, features=5)])


def test_one_bundle_twice_is_refused() -> None:
    with pytest.raises(BundleError, match="expected a bundle that was not given yet, got the same one again"):
        check_fleet([_bundle(1), _bundle(2), _bundle(1)])


# ── projection ──


@given(width=st.integers(1, 40), share=st.floats(0.0, 1.0), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_a_projection_has_orthonormal_columns_and_is_its_seeds_alone(width: int, share: float, seed: int) -> None:
    to = max(1, round(share * width))
    made = projection(width, to, seed)
    assert made.shape == (width, to)
    np.testing.assert_allclose(made.T @ made, np.eye(to), atol=1e-12)
    np.testing.assert_array_equal(made, projection(width, to, seed))


def test_another_seed_is_another_projection() -> None:
    assert np.abs(projection(16, 4, 0) - projection(16, 4, 1)).max() > 0.1


@pytest.mark.parametrize("to", [0, 17, -1])
def test_a_projection_is_no_wider_than_the_features(to: int) -> None:
    with pytest.raises(MethodError, match=f"projection, expected a width of 1 to 16, got {to}"):
        projection(16, to, 0)
