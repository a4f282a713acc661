"""The cheapest choice that meets an accuracy and a deadline.

A choice is a way, so many rounds a day, and a board and a radio for each group. Given the first two, the groups are
independent: money adds up, and the slowest decides when a round ends. So each group takes its cheapest alternative that
fits and meets the deadline, and there are as many choices as ways times rounds a day.

Each condition has one of four answers, by the bounds:

    yes         it is met even by the worse bound
    perhaps     by the figure, not by the worse bound
    no          not by the figure
    not known   a figure has no ground

A choice is taken only where every condition is `yes`; where there is none, the plan says so and names the cheapest
`perhaps`. What costs within 1 % of the choice is named beside it: most of their bounds are common to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from protofleet.hw_profiles.plan.bill import Bill, bill
from protofleet.hw_profiles.plan.device_work import way_work
from protofleet.hw_profiles.plan.fleet_file import Fleet, Way
from protofleet.hw_profiles.ranges import Range

__all__ = ["Answer", "Choice", "cheapest", "choices", "every_bill"]

Answer = Literal["yes", "perhaps", "no", "not known"]
_ORDER: tuple[Answer, ...] = ("yes", "perhaps", "not known", "no")


@dataclass(frozen=True)
class Choice:
    """One way and so many rounds a day, with what each group takes.

    Attributes:
        finish_h: from the first round's opening to the end of the last.
        money: a month, of the fleet; None where a part is not known.
        accuracy, deadline, works: the answers; `works`: every board fits, and a round ends before the next begins.
        why: a line for each answer that is not `yes`.
    """

    way: Way
    rounds_a_day: float
    bills: tuple[Bill, ...]
    finish_h: Range | None
    money: Range | None
    megabytes: Range
    accuracy: Answer
    deadline: Answer
    works: Answer
    why: tuple[str, ...]

    @property
    def meets(self) -> Answer:
        """The weakest of its answers."""
        return max((self.accuracy, self.deadline, self.works), key=_ORDER.index)


def every_bill(fleet: Fleet, way: Way, rounds_a_day: float) -> list[list[Bill]]:
    """For each group, the bill of each of its alternatives."""
    work = way_work(way)
    return [
        [bill(fleet, work, group, board, radio, rounds_a_day) for board in group.boards for radio in group.radios]
        for group in fleet.groups
    ]


def choices(fleet: Fleet) -> list[Choice]:
    """Every way with every number of rounds a day: those that meet the goal first, cheap ones first."""
    found = [_choice(fleet, way, often) for way in fleet.ways for often in fleet.rounds_a_day]
    return sorted(found, key=lambda one: (_ORDER.index(one.meets), *_spent(one.money)))


def cheapest(found: Sequence[Choice]) -> Choice | None:
    """The choice that is taken: it meets the goal for certain, and its money is known."""
    return next((one for one in found if one.meets == "yes" and one.money is not None), None)


def _choice(fleet: Fleet, way: Way, rounds_a_day: float) -> Choice:
    groups = every_bill(fleet, way, rounds_a_day)
    taken = [min(alternatives, key=lambda one: _rank(fleet, way, one)) for alternatives in groups]
    finish = _finish(way, taken)
    deadline, works = _deadline(fleet, finish), max((_works(one) for one in taken), key=_ORDER.index)
    accuracy = _accuracy(fleet, way)
    return Choice(
        way=way,
        rounds_a_day=rounds_a_day,
        bills=tuple(taken),
        finish_h=finish,
        money=_total(one.money for one in taken),
        megabytes=_total(one.megabytes_a_month for one in taken) or Range(),
        accuracy=accuracy,
        deadline=deadline,
        works=works,
        why=tuple(_why(fleet, way, taken, accuracy, deadline, finish)),
    )


def _rank(fleet: Fleet, way: Way, one: Bill) -> tuple[int, bool, float]:
    """Least first: whether it may be taken, whether its money is known, and the money."""
    answer = max((_works(one), _deadline(fleet, _finish(way, [one]))), key=_ORDER.index)
    return _ORDER.index(answer), *_spent(one.money)


def _spent(money: Range | None) -> tuple[bool, float]:
    """Sorts what is not known last."""
    return (True, 0.0) if money is None else (False, money.value)


def _finish(way: Way, bills: Sequence[Bill]) -> Range | None:
    """Hours until the last round ends, which the slowest group decides."""
    ends = [one.round_s for one in bills]
    if any(end is None for end in ends):
        return None
    waiting_h = 24.0 * (way.rounds - 1) / bills[0].rounds_a_day
    return Range(*(waiting_h + max(getattr(end, name) for end in ends) / 3600 for name in ("value", "low", "high")))


def _accuracy(fleet: Fleet, way: Way) -> Answer:
    if fleet.goal.accuracy is None:
        return "yes"
    if way.accuracy is None:
        return "not known"
    return _at_least(way.accuracy.value, way.accuracy.low, fleet.goal.accuracy)


def _at_least(value: float, worse: float, wanted: float) -> Answer:
    if worse >= wanted:
        return "yes"
    return "perhaps" if value >= wanted else "no"


def _deadline(fleet: Fleet, finish: Range | None) -> Answer:
    if fleet.goal.deadline_h is None:
        return "yes"
    if finish is None:
        return "not known"
    return _at_least(-finish.value, -finish.high, -fleet.goal.deadline_h)


def _works(one: Bill) -> Answer:
    """Whether the board has the memory, and whether a round ends before the next begins."""
    if not one.work.fits:
        return "no"
    if one.round_s is None:
        return "not known"
    return _at_least(-one.round_s.value, -one.round_s.high, -86_400.0 / one.rounds_a_day)


def _why(
    fleet: Fleet, way: Way, bills: Sequence[Bill], accuracy: Answer, deadline: Answer, finish: Range | None
) -> Iterable[str]:
    if accuracy != "yes":
        said = "none is given" if way.accuracy is None else f"{way.accuracy.low:g} to {way.accuracy.high:g}"
        yield f"accuracy {said}, {fleet.goal.accuracy:g} wanted"
    if deadline in ("perhaps", "no") and finish is not None:
        yield f"ends after {finish.low:.3g} to {finish.high:.3g} h, {fleet.goal.deadline_h:g} h wanted"
    for one in bills:
        where = f"{one.group.name}: {one.board.name}"
        if not one.work.fits:
            yield f"{where} has too little memory"
        if one.fits_the_day is False and one.round_s is not None:
            yield f"{where} may not end a round before the next: up to {one.round_s.high:,.0f} s"
        for gap in one.gaps:
            yield f"{where}: {gap}"


def _total(figures: Iterable[Range | None]) -> Range | None:
    total = Range()
    for figure in figures:
        if figure is None:
            return None
        total = total.plus(figure)
    return total
