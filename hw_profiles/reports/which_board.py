"""The first screen's answer: which board, which array, or what one array takes, in a few sentences.

`which_board` compares the devices of a profile by a round where the bundle trains, by an inference where it does not.
It names the slowest and the fastest that fit, each with its interval and support. What has no ground is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protofleet.contract.names import listed
from protofleet.hw_profiles.latency.precisions import PRECISIONS
from protofleet.hw_profiles.memory.liveness import batch_text
from protofleet.hw_profiles.units import few, size, time_text

__all__ = ["fits_text", "short_title", "what_it_takes", "which_array", "which_board"]

_Values = Mapping[str, Any]


def short_title(device: _Values) -> str:
    """The title up to its first comma, without the maker."""
    return str(device["title"]).split(",")[0].removeprefix("NVIDIA ")


def fits_text(memory: _Values) -> str:
    """Whether all that a device does has the memory: yes, no, or what of it."""
    beyond = ", extrapolated" if memory["extrapolated"] else ""
    if memory["fits"]:
        return "yes" + beyond
    if not memory["inference_fits"]:
        return "no" + beyond
    return ("all but the closing round" if memory["training_fits"] else "inference only") + beyond


@dataclass(frozen=True)
class _Time:
    """What one device takes, in milliseconds; of a simulation low and high are the figure itself."""

    device: _Values
    ms: float
    low: float
    high: float
    support: str

    def __str__(self) -> str:
        between = f"{time_text(self.low)} to {time_text(self.high)}, " if self.support != "simulated" else ""
        return f"{time_text(self.ms)} ({between}{self.support})"


def which_board(report: _Values) -> str:
    """Of what `profile_report` returns."""
    trains = bool(report["subject"]["training_step_macs"])
    what = f"a round of {report['samples']:,} photos" if trains else "an inference"
    found = [(device, _time(device, trains=trains)) for device in report["devices"]]
    known = sorted((t for d, t in found if isinstance(t, _Time) and d["memory"]["fits"]), key=lambda t: -t.ms)
    says = _of_those_that_fit(known, what, several=len(found) > 1)
    small = [device for device, _ in found if not device["memory"]["fits"]]
    if small:
        says.append(f"Too little memory: {few([f'{short_title(d)} ({_memory(d)})' for d in small])}.")
    apart = [f"{short_title(d)} ({t})" for d, t in found if isinstance(t, str) and d["memory"]["fits"]]
    if apart:
        says.append(f"Not compared: {few(apart)}.")
    if len(known) > 1:
        says.append("Prices are yours: protofleet plan takes the cheapest by them.")
    return " ".join(says)


def _of_those_that_fit(slow_first: Sequence[_Time], what: str, *, several: bool) -> list[str]:
    if not slow_first:
        return ["No board here fits with a time that has ground." if several else "This board does not do."]
    slowest, fastest = slow_first[0], slow_first[-1]
    title, at_most = short_title(slowest.device), _memory(slowest.device)
    if not several:
        return [f"{title} fits: {what} takes {slowest}; memory {at_most}."]
    says = [f"The slowest that fits is {title}: {what} takes {slowest}; memory {at_most}."]
    rivals = [short_title(t.device) for t in slow_first[1:] if t.high > slowest.low]
    if rivals:
        says.append(f"Perhaps slower, by the intervals: {few(rivals, 2)}.")
    if fastest is not slowest:
        says.append(f"The fastest is {short_title(fastest.device)}: {fastest}.")
    return says


def _time(device: _Values, *, trains: bool) -> _Time | str:
    """A round's or an inference's time, or why there is none to compare."""
    entry = device["training_step"] if trains else device["inference"][0]
    if entry is None:
        return "no training predicted"
    if entry["support"] == "no ground":
        return "no ground"
    steps = entry["round_steps"] if trains else 1
    low, high = (entry["latency_ms"] if entry[k] is None else entry[k] for k in ("low_ms", "high_ms"))
    return _Time(device, steps * entry["latency_ms"], steps * low, steps * high, entry["support"] or entry["kind"])


def _memory(device: _Values) -> str:
    memory = device["memory"]
    beyond = ", extrapolated" if memory["extrapolated"] else ""
    return f"at most {size(memory['peak_bytes_at_most'])} of {size(memory['usable_bytes'])}{beyond}"


def what_it_takes(report: _Values) -> str:
    """Of what `cost_report` returns: one array."""
    subject, fits = report["subject"], report["memory"]["largest_batch"]
    on = f"On {report['device']}"
    if report["methods"]:
        base, quickest = report["methods"][0], min(report["methods"], key=lambda row: row["step_ms"])
        says = f"{on} a step of {base['method']} with a batch of {subject['batch']} takes {time_text(base['step_ms'])}"
        says += f", a round {time_text(1e3 * base['round_s'])} (simulated, so without interval)."
        if quickest is not base:
            saved = f"{quickest['saved_percent']['latency']:.1f} % less"
            says += f" The quickest is {quickest['method']}: {time_text(quickest['step_ms'])}, {saved}."
    else:
        took = time_text(report["inference"]["latency_ms"])
        says = f"{on} a forward pass of {subject['batch']} takes {took} (simulated, so without interval)."
    capacity, most = size(report["memory"]["capacity_bytes"]), {use: batch_text(fits[use]) for use in fits}
    batches = [f"{most['training']} in training", f"{most['inference']} in inference"]
    batches = batches if report["methods"] else batches[1:]
    return f"{says} Largest batch in {capacity}: {', '.join(batches)} (predicted).{_cannot_be_built(report)}"


def _cannot_be_built(report: _Values) -> str:
    """A sentence for an array whose cells the chip has too few multiplier blocks for; else empty."""
    precision, able = report["array"]["precision"], report["buildable"]
    if precision in able:
        return ""
    others = listed([name if PRECISIONS[name].trains else f"{name} (inference only)" for name in able])
    instead = f"--precision {others} can" if able else "no precision can"
    return f" The chip has too few multipliers for this array in {precision}: it cannot be built so; {instead}."


def which_array(report: _Values, most: int = 2) -> str:
    """Of what `sweep_report` returns: for the first methods, the fastest array, and the smallest that none beats."""
    points = [point for point in report["points"] if point["front"] and not point["published"]]
    methods = list(dict.fromkeys(point["method"] for point in points))
    says = [_best_arrays([p for p in points if p["method"] == name], name) for name in methods[:most]]
    return " ".join((*says, "Times are simulated; energy and memory predicted."))


def _best_arrays(front: Sequence[_Values], name: str) -> str:
    fastest = min(front, key=lambda point: (point["photo_ms"], point["chip_share"]))
    smallest = min(front, key=lambda point: (point["chip_share"], point["photo_ms"]))
    low, high = (f"{fastest[f'photo_mj_{end}']:.3g}" for end in ("low", "high"))
    says = f"For {name} the fastest array is {_array(fastest)}: {time_text(fastest['photo_ms'])} and {low} to {high} mJ"
    says += f" a photo, {100 * fastest['chip_share']:.0f} % of the chip."
    if smallest is fastest:
        return says
    share, took = f"{100 * smallest['chip_share']:.0f} %", time_text(smallest["photo_ms"])
    return f"{says} The smallest that none beats is {_array(smallest)}: {share} of the chip, {took}."


def _array(point: _Values) -> str:
    return f"{point['rows']}x{point['cols']} {point['precision']} {point['dataflow']} at {point['mhz']:g} MHz"
