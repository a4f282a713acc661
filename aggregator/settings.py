"""What an aggregator was asked to do, and whether it fits the fleet's bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aggregator.outliers import Suspects
from aggregator.rounds import Policy
from aggregator.validation import MAX_SAMPLES
from contract.bundle import Manifest
from contract.errors import UsageError, near_names
from contract.messages import MAX_ROUND, Encoding
from contract.methods import METHODS, Method, Value, closing_method, runs_on
from contract.methods import method as method_of
from contract.rules import Rule
from contract.sealing import HelperPublic
from contract.state import least_limit_bytes

__all__ = [
    "Settings",
    "adds_up",
    "check_gateways",
    "check_heads",
    "check_limit",
    "least_limit_of",
    "own_method",
    "standing_method",
]


@dataclass(frozen=True)
class Settings:
    """What the aggregator was asked to do.

    Attributes:
        method: of the rounds; the bundle's own when None. Another is one that trains nothing.
        rounds, calibrate: see `rounds.plan`; as many as the method usually has when None.
        rule: how class means merge; other sums always add up.
        encoding, sums_encoding: how tensors travel up, and how where the method asks for float64.
        min_samples: classes with fewer local examples are withheld by the devices, and refused.
        max_samples: the most that one device may say it has.
        max_share, suspects, vouched: see `outliers.screen`.
        hyper: hyper-parameters of the rounds' methods that are taken instead of the bundle's: FFC's `ridge`, say.
        limit_bytes: the largest message taken and sent.
        enrolled: whether only devices that are enrolled are heard.
        standing_every_s: where sums stand, how long a head stays at least before the next is made; None for rounds.
        gateways: who may send sums for the devices behind them.
        helper: whose helper opens the sums of rounds, which are blinded then; None for open ones.
        least: k: no sum over fewer devices is asked for.
    """

    method: str | None = None
    rounds: int | None = None
    calibrate: bool = True
    policy: Policy = field(default_factory=Policy)
    rule: Rule = "mean"
    encoding: Encoding = "f32"
    sums_encoding: Encoding = "f64"
    min_samples: int = 1
    max_samples: int = MAX_SAMPLES
    max_share: float | None = None
    suspects: Suspects = "leave-out"
    vouched: tuple[str, ...] = ()
    hyper: Mapping[str, Value] = field(default_factory=dict)
    limit_bytes: int = 65_536
    enrolled: bool = False
    standing_every_s: float | None = None
    gateways: tuple[str, ...] = ()
    helper: HelperPublic | None = None
    least: int = 0

    @property
    def samples_told(self) -> int:
        """`max_samples` as it is announced: to gateways, which hold their devices to it; 0 where there are none."""
        return min(self.max_samples, MAX_ROUND) if self.gateways else 0


def own_method(manifest: Manifest, settings: Settings) -> str:
    """Of the rounds before the closing one."""
    known, wanted = runs_on(manifest.method), settings.method or manifest.method
    if wanted not in known:
        raise UsageError(
            "--method", expected=f"{manifest.method}, as the bundle, or one that trains nothing", got=wanted,
            hint=near_names(wanted, known),
        )  # fmt: skip
    return wanted


def standing_method(manifest: Manifest, settings: Settings) -> Method:
    """Whose sums stand.

    Raises:
        UsageError: they cannot: the method has rounds, or the bundle's adds noise.
    """
    found, able = method_of(own_method(manifest, settings)), [m.name for m in METHODS.values() if m.stands]
    if not found.stands:
        raise UsageError(
            "--standing",
            expected=f"a method whose sums add up over the bundle's extractor: {' or '.join(able)}",
            got=found.name,
            hint=f"--method {able[-1]}",
        )
    if any(each.mechanism(manifest.hyper) is not None for each in (method_of(manifest.method), found)):
        raise UsageError(
            "--standing",
            expected="a bundle without noise",
            got=f"{manifest.method} with noise, which every new sum would spend ε of",
            hint="rounds, without --standing",
        )
    return found


def adds_up(found: Method, hyper: Mapping[str, Value]) -> bool:
    """Whether a round's result follows from the sum of what its devices send: then a gateway can send that for some of
    them, and nothing is lost (`protofleet/gateway`)."""
    plain = type(found).merge is Method.merge and found.weighting_of(hyper) == "count"
    counted = found.statistic.COUNTED and bool(found.statistic.row_fields())
    return plain and counted and found.mechanism(hyper) is None


def check_gateways(settings: Settings, manifest: Manifest, methods: Iterable[str]) -> None:
    """See to it that gateways can send what rounds are made of.

    Raises:
        UsageError: when they cannot.
    """
    if not settings.gateways:
        return
    for found in map(method_of, dict.fromkeys(methods)):
        if not adds_up(found, found.settled_in(manifest.hyper)):
            able = [m.name for m in METHODS.values() if adds_up(m, m.settled_in({}))]
            raise UsageError(
                "--gateway",
                expected=f"rounds whose result is a sum: {', '.join(able)}",
                got=f"{found.name}, which weighs devices one by one, hides them in noise, or sends no sums",
            )


def least_limit_of(manifest: Manifest) -> int:
    """One class row of whatever comes back must fit a message, since rows are not cut."""
    found = method_of(manifest.method)
    back = found.row_kinds(found.settled_in(manifest.hyper), manifest.classes, manifest.features)
    return least_limit_bytes(max([manifest.features, *back.values()]))


def check_limit(manifest: Manifest, settings: Settings) -> None:
    least = least_limit_of(manifest)
    if not least <= settings.limit_bytes <= 1 << 28:
        raise UsageError("--limit-bytes", expected=f"at least {least} for class rows", got=settings.limit_bytes)


def check_heads(settings: Settings, methods: Iterable[str]) -> None:
    """See to it that what a head is to be made with is used by one of the methods.

    Raises:
        UsageError: when it is not.
    """
    given, named = set(settings.hyper) & set(closing_method().solved_with), list(dict.fromkeys(methods))
    unused = given - {name for each in named for name in method_of(each).solved_with}
    if unused:
        options = ", ".join(f"--{name}" for name in sorted(unused))
        got = f"rounds of {', '.join(named)}"
        raise UsageError(options, expected="a round whose head is made with it", got=got, hint="leaving it out")
