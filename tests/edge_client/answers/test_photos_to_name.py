"""Kept photos: near copies once, the unknown apart; and whether enough were named."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from commands import one_error_line, run

from protofleet.edge_client.answers.label_report import difference, report_of, wilson
from protofleet.edge_client.answers.photos_to_name import alike, photos_to_name
from protofleet.edge_client.photos.kept_photo import KeptPhoto


def photo(number: int, **facts: object) -> KeptPhoto:
    given: dict[str, object] = {
        "number": number,
        "pixels": bytes([number]) * 16,
        "name": str(number),
        "taken_s": 1.0,
        "last_s": 1.0,
        "times": 1,
        "answer": "open",
        "probability": 0.5,
        "novelty": 0.1,
        "is_unknown": False,
        "uncertainty": 0.5,
        "version": 1,
        "waits": 0,
        "aside": "",
        "proposed": "",
    }
    return KeptPhoto(**(given | facts))  # type: ignore[arg-type]


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def bursts(seed: int = 0) -> np.ndarray:
    """Twelve scenes of five frames each, which differ by a little noise, as rows 0 to 59."""
    rng = np.random.default_rng(seed)
    scenes = np.repeat(rng.normal(size=(12, 64)), 5, axis=0)
    return unit(scenes + 0.05 * rng.normal(size=scenes.shape))


def test_frames_of_one_scene_are_one_and_scenes_are_not() -> None:
    assert alike(bursts(), range(60)) == [list(range(start, start + 5)) for start in range(0, 60, 5)]
    still = unit(np.ones((9, 64)) + 0.01 * np.random.default_rng(1).normal(size=(9, 64)))
    assert alike(still, range(9)) == [list(range(9))]  # a camera that sees the same all day
    assert alike(still, []) == []


def test_each_scene_is_asked_about_once_without_what_is_named_or_set_aside_and_the_unknown_is_apart() -> None:
    features = bursts()
    facts: dict[int, dict[str, object]] = {row: {"is_unknown": True, "novelty": 2.0} for row in range(5, 10)}
    facts |= {row: {"is_unknown": True, "novelty": 3.0, "times": 2} for row in range(15, 20)}
    facts |= {row: {"aside": "unsure"} for row in range(20, 25)}
    photos = [photo(row, **facts.get(row, {})) for row in range(60)]
    named = {photos[row].pixels for row in range(30, 35)}
    wanted, unknown = photos_to_name(photos, features, named, 20, random_share=0.0)
    assert sorted(one.photo.number for one in wanted) == [0, 10, 25, 35, 40, 45, 50, 55]
    assert [(one.photo.number, one.times, one.why) for one in unknown] == [(15, 10, "unknown"), (5, 5, "unknown")]
    assert {one.times for one in wanted} == {5}
    assert photos_to_name([], np.empty((0, 0), np.float32), (), 5) == ([], [])


def test_what_is_like_a_named_photo_comes_after_what_is_like_none() -> None:
    """The features of named photos are those of the ring, where nobody gives others."""
    features = unit(np.repeat(np.random.default_rng(0).normal(size=(12, 64)), 5, axis=0))
    photos = [photo(row, uncertainty=0.9 if row < 30 else 0.1) for row in range(60)]
    named = {photos[row].pixels for row in range(0, 30, 5)}  # one of each of the scenes that it is unsure of
    wanted, _ = photos_to_name(photos, features, named, 6, random_share=0.0)
    assert sorted(one.photo.number for one in wanted) == [30, 35, 40, 45, 50, 55]
    assert {one.why for one in wanted} == {"new"}
    wanted, _ = photos_to_name(photos, features, named, 10)  # as the page asks: one of ten is drawn
    assert sum(one.why == "random" for one in wanted) == 1


def test_wilsons_interval_is_where_the_share_is_as_far_as_chance_goes() -> None:
    for right, asked in ((0, 5), (3, 7), (7, 7), (40, 50)):
        low, high = wilson(right, asked)
        for bound in (low, high):
            if 0.0 < bound < 1.0:  # the definition: |right/asked − p| = 1.96 √(p (1 − p) / asked)
                off = abs(right / asked - bound)
                assert math.isclose(off, 1.959963984540054 * math.sqrt(bound * (1 - bound) / asked), rel_tol=1e-9)
        assert 0.0 <= low <= right / asked <= high <= 1.0
    assert wilson(0, 0) == (0.0, 1.0)


def test_ten_more_help_most_where_answers_are_wrong_and_labels_are_few() -> None:
    learned = [("open", "open")] * 30 + [("closed", "open")] * 6 + [("closed", "closed")] * 2 + [("ajar", "")] * 8
    report = report_of(("open", "closed", "ajar"), learned)
    found = {one.label: (one.labels, one.asked, one.right) for one in report.classes}
    assert found == {"open": (30, 30, 30), "closed": (8, 8, 2), "ajar": (8, 0, 0)}
    assert report.most_helpful == "closed"
    assert report.warnings == ()
    assert report_of(("open", "closed"), []).most_helpful == "open"


def test_a_class_that_became_worse_while_another_was_named_is_told() -> None:
    learned = (
        [("closed", "closed")] * 10 + [("open", "open")] * 50 + [("closed", "open")] * 8 + [("closed", "closed")] * 2
    )
    (line,) = report_of(("open", "closed"), learned).warnings
    assert line.startswith("closed is answered worse than before: 2 of the last 10 right, 10 of the 10 before")
    assert "mostly open is answered instead" in line


def rare_classes(before: int, after: int, instead: str = "a") -> list[tuple[str, str]]:
    """Forty labels of a; before and after these, eight answers about each of b, c and d, so many of them right."""
    asked = [(label, turn) for turn in range(8) for label in "bcd"]

    def answers(right: int) -> list[tuple[str, str]]:
        return [(label, label if number < right else instead) for number, (label, _) in enumerate(asked)]

    return answers(before) + [("a", "a")] * 40 + answers(after)


def test_classes_that_were_named_less_often_and_became_worse_together_are_told() -> None:
    """No single one of them has answers enough to say so."""
    (line,) = report_of("abcd", rare_classes(18, 8)).warnings
    assert line.startswith("classes that you named less often are answered worse than before: 8 of their last 24 right")
    assert "18 of the 24 before (13 to 62 points less, 95 % interval); mostly a is answered instead" in line
    assert "so name more photos of d, b or c;" in line
    assert "--form even" in line


@pytest.mark.parametrize(
    ("learned", "why"),
    [
        (rare_classes(18, 18), "as good as before"),
        (rare_classes(18, 14), "chance goes as far"),
        (rare_classes(8, 18), "better"),
        (rare_classes(18, 8, "b"), "what is answered instead was not named often"),
        (rare_classes(18, 8)[:10], "too few"),
        ([("b", "b")] * 3 + [("b", "a")] * 3 + [("a", "a")] * 60, "three and three"),
        ([("b", ""), ("c", "")] * 20 + [("a", "a")] * 60, "nobody asked"),
    ],
)
def test_there_is_no_warning_about_classes_that_were_named_less_often(learned: list[tuple[str, str]], why: str) -> None:
    assert report_of("abcd", learned).warnings == (), why


def test_a_class_that_is_warned_of_by_itself_is_not_told_again() -> None:
    alone = [("b", "b")] * 10 + [("a", "a")] * 60 + [("b", "a")] * 10
    (line,) = report_of("abcd", alone).warnings
    assert line.startswith("b is answered worse than before: 0 of the last 10 right")


def test_the_interval_of_a_difference_is_newcombes() -> None:
    low, high = difference(56, 70, 48, 80)  # his table II, method 10
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
    assert difference(0, 0, 3, 4) == (-1.0, 1.0)


@pytest.mark.parametrize("command", ["labels", "suggest"])
def test_without_a_state_that_has_photos_it_is_one_line(command: str, tmp_path: Path) -> None:
    done = run(command, "--state", tmp_path)
    assert done.returncode != 0
    assert ("expected a journal" if command == "labels" else "got none kept there") in one_error_line(done)
