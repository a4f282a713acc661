"""What the lab prints at the end: the demo's one table, and a line for each simulated round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from protofleet.contract.methods import closing_method, method
from protofleet.hw_profiles.units import nice_bytes
from protofleet.lab.engine.deployed import RoundRecord

__all__ = ["demo_table", "gain_line", "living_table", "round_line"]


def demo_table(s: Mapping[str, Any]) -> Group:
    """The demo's table and the lines under it, from its summary."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("right on test images")
    for heading in ("new classes", "all classes", "up, device and round"):
        table.add_column(heading, justify="right")
    for label, way, up in _rows(s):
        figures = [s["accuracy"][part][way] for part in ("new_classes", "all_classes")]
        table.add_row(label, *("" if figure is None else f"{figure:.1%}" for figure in figures), up)
    if "personal" in s["other_answers"]:
        label = f"{method(s['method']).title}, personal head"
        table.add_row(label, "", f"{s['other_answers']['personal']['all_classes']:.1%}", "0 B")
    fedavg = nice_bytes(s["fedavg_bytes_per_device_round"])
    table.add_row("[dim]FedAvg would send[/dim]", "", "", f"[dim]{fedavg}[/dim]")
    return Group("", table, "", *_facts(s))


def living_table(s: Mapping[str, Any]) -> Group:
    """The living demo's table and the lines under it, from its summary."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("right on test images")
    shown = [day for day in s["days"] if day["day"] in s["shown_days"]]
    for day in shown:
        table.add_column(f"day {day['day']}", justify="right")
    for label, way, part in (
        ("the fleet", "fleet", "right"),
        ("all photos pooled", "pooled", "right"),
        ("a device alone", "alone", "right"),
        (f"the fleet, on {s['new_label']}", "fleet", "new"),
    ):
        table.add_row(label, *(f"{day[way][part]:.1%}" for day in shown))
    return Group("", table, "", *_living_facts(s))


def _living_facts(s: Mapping[str, Any]) -> list[str]:
    c, never, forgotten = s["contributions"], s["never"], s["forgotten"]
    differ = (
        f"{never['differing_integers']} of {never['integers']:,} integers of the sums, {never['head_differing']} of "
    )
    pieces = f"{forgotten['before']} pieces of its message in the store before, {forgotten['after']} after"
    return [
        f"forgotten     {forgotten['device']}, with {forgotten['samples']} photos: {pieces}",
        f"exact         {differ}{never['head_numbers']:,} numbers of the head",
        "              differ from a fleet in which nothing of this happened",
        f"receipts      {c['sent']} contributions sent, {c['counted']} counted, {c['duplicate']} of them came again, "
        f"{c['pending']} waiting",
        f"memory        {s['device_peak_rss_bytes'] / 1e6:.0f} MB peak in the largest device process",
        f"time          {s['seconds']:.0f} s",
        "",
    ]


def _rows(s: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the table: label, way of answering, and bytes up."""
    row = method(s["method"])
    up, once = nice_bytes(s["uplink_bytes_per_device_round"]), s["closing_uplink_bytes_per_device"]
    rows = [
        ("public images alone", "public_alone", ""),
        ("bundle as shipped", "bundle_as_shipped", ""),
        ("a device alone", "local_only", "0 B"),
        (f"fleet: {row.title}, {row.inference}", "federated", up),
    ]
    closing = closing_method()
    if once is not None and not row.closes_runs:
        rows.append((f"fleet: {closing.title}, {closing.inference}", "closing", f"{nice_bytes(once)}, once"))
    if once is not None:
        rows.append(("pooled ridge, the ceiling", "pooled_ridge", "all images in one place"))
    return rows if s["new_labels"] else rows[1:]


def _facts(s: Mapping[str, Any]) -> list[str]:
    c, against, equal = s["contributions"], s["closing_vs_pooled_ridge"], []
    if against is not None:
        same = f"{against['equal_predictions']} of {s['test_images']} predictions equal"
        equal = [f"FFC = pooled  relative error {against['relative_error']:.1e}, {same}"]
    digits = 2 if s["uplink_share"] >= 1e-4 else 4
    new = ", ".join(s["new_labels"])
    return [
        f"new classes   {new}: the public images show none of them"
        if new
        else "new classes   to each device those of which it has no photo",
        f"uplink        {s['uplink_share']:.{digits}%} of FedAvg's bytes for the same backbone",
        f"receipts      {c['sent']} contributions sent, {c['committed']} committed, "
        f"{c['duplicates_refused']} duplicates refused",
        *equal,
        *_other_ways(s),
        f"memory        {s['device_peak_rss_bytes'] / 1e6:.0f} MB peak in the largest device process",
        f"time          {s['seconds']:.0f} s",
        "",
    ]


def _other_ways(s: Mapping[str, Any]) -> list[str]:
    """What fewer and more bytes would give, a line for each way."""
    each = [f"{o['way']:<30}{o['right']:.1%}  {nice_bytes(o['uplink_bytes'])}" for o in s["other_ways"]]
    return [f"{'' if number else 'other ways':<14}{line}" for number, line in enumerate(each)]


def gain_line(records: Sequence[RoundRecord]) -> str:
    """The gain of a run of several rounds: each way of answering at its first measurement and at the end.

    Both are on the same test images of all classes. Empty where there was one round.
    """
    first, last = dict[str, tuple[int, float]](), dict[str, tuple[int, float]]()
    for record in records:
        for way, accuracy in record.all_classes.items():
            first.setdefault(way, (record.round, accuracy))
            last[way] = record.round, accuracy
    gains = []
    for way, (number, before) in first.items():
        last_round, accuracy = last[way]
        then = f" ({before:.1%} after round {number})" if last_round != number else ""
        gains += [f"{way} {accuracy:.1%} after round {last_round}{then}"] if way != "prototype_among_own" else []
    return f"right on test images of all classes: {'; '.join(gains)}" if len(records) > 1 and gains else ""


def round_line(record: RoundRecord) -> str:
    """One simulated round as a line."""
    parts = [f"round {record.round:>3}  {record.method:<9}", f"{record.participants:>3} clients"]
    parts += [f"loss {record.loss:.4f}"] if record.loss is not None else []
    parts += [f"up {nice_bytes(record.uplink_bytes):>7}"] if record.uplink_bytes else []
    for way, accuracy in record.all_classes.items():
        if way == "prototype_among_own":
            continue  # the other reading of eq. 2; it is in the JSON
        own = record.own_classes.get(way)
        parts.append(f"{way} {accuracy:.1%}" + (f" (own {own:.1%})" if own is not None else ""))
    for part in ("local_test", "personal"):
        parts += [f"{part} {way} {value:.1%}" for way, value in getattr(record, part, {}).items()]
    return "  ".join(parts)
