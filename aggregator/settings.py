"""The settings of an aggregator, and whether they fit the fleet's bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protofleet.aggregator.ingest.validation import MAX_SAMPLES
from protofleet.aggregator.rounds.round_machine import Policy
from protofleet.aggregator.screening.outliers import Suspects
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.methods import METHODS, Method, Value, closing_method, runs_on
from protofleet.contract.methods import method as method_of
from protofleet.contract.privacy.sealing import HelperPublic
from protofleet.contract.sums.merge_rules import Rule
from protofleet.contract.wire.global_state import least_limit_bytes
from protofleet.contract.wire.messages import MAX_ROUND, Encoding

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
    """The settings of an aggregator.

    Attributes:
        method: of the rounds; the bundle's own when None. Any other must train nothing.
        rounds, calibrate: see `rounds.plan`; when None, as many rounds as the method usually has.
        rule: how class means merge; other sums always add up.
        encoding, sums_encoding: how tensors travel up; the second is for methods that ask for float64.
        min_samples: devices withhold classes with fewer local examples; such classes are refused.
        max_samples: the most samples that one device may say it has.
        max_share, suspects, vouched: see `outliers.screen`.
        hyper: hyper-parameters of the rounds' methods that replace the bundle's, such as FFC's `ridge`.
        limit_bytes: the largest message taken and sent.
        enrolled: whether only enrolled devices are heard.
        standing_every_s: where sums stand, how long a head stays at least before the next is made; None for rounds.
        gateways: the gateways that may send sums for the devices behind them.
        helper: the helper that opens the sums of blinded rounds; None for open rounds.
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
        """`max_samples` as announced to gateways, which apply it to their devices; 0 without gateways."""
        return min(self.max_samples, MAX_ROUND) if self.gateways else 0


def own_method(manifest: Manifest, settings: Settings) -> str:
    """The name of the method of the rounds before the closing one."""
    allowed, name = runs_on(manifest.method), settings.method or manifest.method
    if name not in allowed:
        raise UsageError(
            "--method", expected=f"{manifest.method}, as the bundle, or one that trains nothing", got=name,
            hint=near_names(name, allowed),
        )  # fmt: skip
    return name


def standing_method(manifest: Manifest, settings: Settings) -> Method:
    """The method whose sums stand.

    Raises:
        UsageError: its sums cannot stand: the method has rounds, or the bundle's method adds noise.
    """
    method, able = method_of(own_method(manifest, settings)), [m.name for m in METHODS.values() if m.stands]
    if not method.stands:
        raise UsageError(
            "--standing",
            expected=f"a method whose sums add up over the bundle's extractor: {' or '.join(able)}",
            got=method.name,
            hint=f"--method {able[-1]}",
        )
    if any(used.mechanism(manifest.hyper) is not None for used in (method_of(manifest.method), method)):
        raise UsageError(
            "--standing",
            expected="a bundle without noise",
            got=f"{manifest.method} with noise, which every new sum would spend ε of",
            hint="rounds, without --standing",
        )
    return method


def adds_up(method: Method, hyper: Mapping[str, Value]) -> bool:
    """Whether a round's result follows from the sum of what its devices send.

    Then a gateway can send the sum for some of them, and nothing is lost (`protofleet/gateway`).
    """
    plain = type(method).merge is Method.merge and method.weighting_of(hyper) == "count"
    counted = method.statistic.COUNTED and bool(method.statistic.row_fields())
    return plain and counted and method.mechanism(hyper) is None


def check_gateways(settings: Settings, manifest: Manifest, methods: Iterable[str]) -> None:
    """Check that gateways can send what the rounds need.

    Raises:
        UsageError: they cannot.
    """
    if not settings.gateways:
        return
    for method in map(method_of, dict.fromkeys(methods)):
        if not adds_up(method, method.resolved_in(manifest.hyper)):
            able = [m.name for m in METHODS.values() if adds_up(m, m.resolved_in({}))]
            raise UsageError(
                "--gateway",
                expected=f"rounds whose result is a sum: {', '.join(able)}",
                got=f"{method.name}, which weighs devices one by one, hides them in noise, or sends no sums",
            )


def least_limit_of(manifest: Manifest) -> int:
    """The smallest message limit: one class row of every kind must fit, since rows are not cut."""
    method = method_of(manifest.method)
    row_widths = method.row_kinds(method.resolved_in(manifest.hyper), manifest.classes, manifest.features)
    return least_limit_bytes(max([manifest.features, *row_widths.values()]))


def check_limit(manifest: Manifest, settings: Settings) -> None:
    least = least_limit_of(manifest)
    if not least <= settings.limit_bytes <= 1 << 28:
        raise UsageError("--limit-bytes", expected=f"at least {least} for class rows", got=settings.limit_bytes)


def check_heads(settings: Settings, methods: Iterable[str]) -> None:
    """Check that one of the methods uses each of the given head options.

    Raises:
        UsageError: no method uses one of them.
    """
    head_options, named = set(settings.hyper) & set(closing_method().solved_with), list(dict.fromkeys(methods))
    unused = head_options - {name for each in named for name in method_of(each).solved_with}
    if unused:
        options = ", ".join(f"--{name}" for name in sorted(unused))
        got = f"rounds of {', '.join(named)}"
        raise UsageError(options, expected="a round whose head is made with it", got=got, hint="leaving it out")
