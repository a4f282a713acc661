"""The settings of an aggregator, and whether they fit the fleet's bundle."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from protofleet.aggregator.database import PLACE, AnyPlace, Place, place_of
from protofleet.aggregator.ingest.validation import MAX_SAMPLES
from protofleet.aggregator.rounds.round_machine import DEADLINE_S, Policy
from protofleet.aggregator.screening.outliers import SUSPECTS, Suspects
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.console.durations import in_words
from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.extras import install_command
from protofleet.contract.files.json_output import JSON_HELP
from protofleet.contract.identity.ed25519 import library
from protofleet.contract.methods import METHOD_HELP, METHODS, Method, Value, closing_method, runs_on
from protofleet.contract.methods import method as find_method
from protofleet.contract.mqtt.address import Address, parse_listen
from protofleet.contract.names import listed
from protofleet.contract.page.page_address import check_page_files, checked_page, read_page
from protofleet.contract.privacy.sealing import HelperPublic, check_least, read_helper_public
from protofleet.contract.settings.common import (
    BrokerSettings,
    SpokenSettings,
    checked_device,
    checked_fleet,
    duration,
)
from protofleet.contract.settings.options import CommandSettings, Option, chosen, fields_of
from protofleet.contract.sums.merge_rules import RULES, Rule, check_rule
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.encodings import ENCODINGS, SUMS_FORMS, SumsForm
from protofleet.contract.wire.global_state import least_limit_bytes
from protofleet.contract.wire.messages import MAX_ROUND, Encoding

__all__ = [
    "AggregateSettings",
    "EmbeddedBrokerSettings",
    "ServedSettings",
    "Settings",
    "SumSettings",
    "adds_up",
    "check_gateways",
    "check_heads",
    "check_limit",
    "least_limit_of",
    "metrics_address",
    "own_method",
    "standing_method",
]

WINDOW_S = 3600.0  # a device that is awake some minutes of each hour meets every window
STANDING_EVERY_S = 60.0
LEAST = 10  # devices of a blinded sum
_TO_COUNT = 2**32 - 1
_OF_ROUNDS = (  # what has no meaning where sums stand
    *("rounds", "rule", "fraction", "max_share", "min_clients", "suspects", "vouch", "when_new", "window", "deadline"),
    *("seed", "calibrate", "helper", "open_clients", "max_clients"),
)


def _method(label: str, value: str) -> str:
    return find_method(value).name


def _rule(label: str, value: str) -> str:
    return check_rule(value, ClassMeans)


def _share(label: str, value: float) -> float:
    if not 0 < value <= 1:
        raise UsageError(label, expected="above 0, up to 1", got=value)
    return value


def _of_head(label: str, value: Value) -> Value:
    option = label.split()[0].lower()  # `--form`, `--form in FILE`, or a variable that ends so
    hyper = next(known for name, known in closing_method().hyper.items() if option.endswith(name))
    return hyper.check(label, value)


def _helper(label: str, value: str | HelperPublic) -> HelperPublic:
    return value if isinstance(value, HelperPublic) else read_helper_public(value, label)


def _store(label: str, value: AnyPlace) -> Place:
    return place_of(value)


def _metrics(label: str, value: str) -> str:
    metrics_address(value)
    return value


def metrics_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, or of `PORT` on this machine alone.

    Raises:
        UsageError: it is no such text, or the package that serves metrics is missing.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("--metrics", expected="prometheus_client", got="nothing", hint=install_command("metrics"))
    return parse_listen(f"127.0.0.1:{text}" if text.isdecimal() else text, "--metrics", "9464")


@dataclass(frozen=True, kw_only=True, repr=False)
class SumSettings(CommandSettings):
    """What is asked of devices, by an aggregator and by a gateway, which is one on a site."""

    method: Annotated[str | None, Option(f"Of the rounds: {METHOD_HELP}", check=_method, absent="the bundle's")] = None
    min_clients: Annotated[
        int, Option("Contributions that close a round, and devices that open it.", low=1, high=_TO_COUNT)
    ] = 1
    every: Annotated[
        float | str | None,
        Option(
            "Stay, and open a round so often: 30m, 6h, 1d. With --standing: how long a head stays at least.",
            check=duration,
            metavar="DURATION",
            absent="never; 60s with --standing",
        ),
    ] = None
    min_samples: Annotated[
        int, Option("Classes with fewer examples are withheld, or refused.", low=1, high=_TO_COUNT)
    ] = 1
    max_samples: Annotated[
        int, Option("Refuse a device that says it has more samples than this.", low=1, high=_TO_COUNT)
    ] = MAX_SAMPLES
    limit_bytes: Annotated[int, Option("Largest message; larger contributions travel in chunks.")] = 65_536
    enrolled: Annotated[bool, Option("Take only what enrolled devices have signed (protofleet fleet invite).")] = False

    def check(self) -> None:
        super().check()
        if self.enrolled:
            library("--enrolled")


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings(SumSettings):
    """The settings of an aggregator's rounds, or of its standing sums."""

    rounds: Annotated[int | None, Option("Rounds of that method.", absent="5, 1 where it trains nothing")] = None
    calibrate: Annotated[bool | None, Option("End with one FFC round.", absent="where there is one bundle")] = None
    when_new: Annotated[
        int,
        Option(
            "Stay, and open a round when --min-clients devices have so many new photos each; 0: never.",
            low=0,
            high=_TO_COUNT,
        ),
    ] = 0
    window: Annotated[
        float | str | None,
        Option(
            "How long each of these rounds is open, whoever sleeps meanwhile.",
            check=duration,
            metavar="DURATION",
            absent="1h",
        ),
    ] = None
    open_clients: Annotated[
        int | None,
        Option(
            "Devices online that open a round.",
            low=1,
            high=_TO_COUNT,
            absent="--min-clients; 1 with --every or --when-new",
        ),
    ] = None
    max_clients: Annotated[
        int, Option("Contributions that close a window before its end; 0: none do.", low=0, high=_TO_COUNT)
    ] = 0
    deadline: Annotated[
        float,
        Option("Seconds a round waits for silent devices; 0 for as long as it takes.", low=0, high=1e9),
    ] = DEADLINE_S
    fraction: Annotated[float, Option("Share of the devices sampled in each round.", check=_share)] = 1.0
    seed: Annotated[int, Option("Seed of the sampling.", low=0, high=_TO_COUNT)] = 0
    max_share: Annotated[
        float | None,
        Option(
            "Largest share of a round's samples that one device counts for.",
            low=0.01,
            high=1.0,
            absent="0.5; of n devices 3/n where that is less, but for those of --vouch",
        ),
    ] = None
    suspects: Annotated[
        Suspects,
        Option(
            "Devices that contradict too many others: " + ", ".join(SUSPECTS) + ".",
            check=chosen(*SUSPECTS),
        ),
    ] = "leave-out"
    vouch: Annotated[
        tuple[str, ...],
        Option(
            "A trusted device, best with photos of all classes: who contradicts it is treated as lying. Repeatable.",
            check=checked_fleet,
        ),
    ] = ()
    ridge: Annotated[
        str | float | None,
        Option(
            "Of a head made of sums, in units of trace/D, or auto: chosen from them.", check=_of_head, absent="auto"
        ),
    ] = None
    form: Annotated[
        str | None,
        Option(
            "Of FFC's head: ridge (eq. 12); even, for classes of unequal samples; auto, the one that fits; or "
            "discriminant.",
            check=_of_head,
            absent="auto",
        ),
    ] = None
    rule: Annotated[Rule, Option("How class means merge: " + ", ".join(RULES) + ".", check=_rule)] = "mean"
    encoding: Annotated[
        Encoding,
        Option(f"Class means on the wire: {listed(ENCODINGS)}.", check=chosen(*ENCODINGS)),
    ] = "f32"
    sums_encoding: Annotated[
        SumsForm,
        Option(
            f"Sums (FFC's) on the wire: {listed(SUMS_FORMS)}. factor: of few samples as a factor, else f64.",
            check=chosen(*SUMS_FORMS),
        ),
    ] = "factor"
    standing: Annotated[
        bool, Option("No rounds: a device's newest sums stand until it replaces or withdraws them (ncm, ffc).")
    ] = False
    gateway: Annotated[
        tuple[str, ...],
        Option("A gateway, by its id, that may send sums for the devices behind it. Repeatable.", check=checked_device),
    ] = ()
    helper: Annotated[
        Any,
        Option("Blinded rounds: public key file of the helper who opens their sums (docs/blinded.md).", check=_helper),
    ] = None
    least: Annotated[
        int | None,
        Option("Devices that a blinded sum has at least, as --min-clients.", absent=f"{LEAST}"),
    ] = None

    def check(self) -> None:
        super().check()
        for name in ("vouch", "gateway"):  # one that is named twice is one
            self.keep(name, tuple(dict.fromkeys(getattr(self, name))))
        if self.standing:
            self.exclude("standing", _OF_ROUNDS, "there are no rounds")
        if self.gateway:
            self.exclude("gateway", ("helper", "rule"), "a gateway sends a sum")
        if self.helper is None and self.least is not None:
            raise UsageError("--least", expected="--helper beside it", got="none")
        if self.helper is not None:
            check_least(self.smallest_sum)
            single = ("rule", "max_share", "suspects", "min_samples", "vouch")
            self.exclude("helper", single, "nothing but a sum is seen")
            self.exclude("helper", ("when_new",), "blinded devices do not say how many photos they have")
        if self.vouch and self.suspects == "ignore":
            what = "--vouch with --suspects ignore"
            raise UsageError(what, expected="one of them", got="both", hint="--suspects name")
        self._check_windows()

    def _check_windows(self) -> None:
        policy = self.policy
        if not policy.stays:
            for name in ("window", "max_clients"):
                if self.is_given(name):
                    option = fields_of(Settings)[name].flag
                    raise UsageError(option, expected="--every or --when-new beside it", got="neither")
            return
        if self.max_clients and self.max_clients < policy.min_clients:
            raise UsageError("--max-clients", expected=f"{policy.min_clients} or more", got=self.max_clients)
        if not 0 < policy.window_s <= (policy.every_s or policy.window_s):
            expected = f"above 0, up to --every ({in_words(policy.every_s)})"
            raise UsageError("--window", expected=expected, got=in_words(policy.window_s))

    @property
    def policy(self) -> Policy:
        """When rounds open and close."""
        every_s = 0.0 if self.standing or self.every is None else float(self.every)
        window_s = min(WINDOW_S, every_s or WINDOW_S) if self.window is None else float(self.window)
        stays = every_s > 0 or self.when_new > 0
        return Policy(
            min_clients=max(self.min_clients, self.smallest_sum),
            deadline_s=self.deadline,
            fraction=self.fraction,
            seed=self.seed,
            open_clients=1 if self.open_clients is None and stays else self.open_clients,
            every_s=every_s,
            when_new=self.when_new,
            window_s=window_s if stays else 0.0,
            max_clients=self.max_clients,
        )

    @property
    def standing_every_s(self) -> float:
        """Where sums stand, how long a head stays at least before the next is made."""
        return STANDING_EVERY_S if self.every is None else float(self.every)

    @property
    def smallest_sum(self) -> int:
        """k: no sum over fewer devices is asked for; 0 where rounds are open."""
        return 0 if self.helper is None else LEAST if self.least is None else self.least

    @property
    def hyper(self) -> dict[str, Value]:
        """Hyper-parameters of heads that replace the bundle's."""
        given = {"ridge": self.ridge, "form": self.form}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def samples_told(self) -> int:
        """`max_samples` as announced to gateways, which apply it to their devices; 0 without gateways."""
        return min(self.max_samples, MAX_ROUND) if self.gateway else 0

    def digest(self) -> str:
        """Of what decides which contributions are taken, in hex; processes on one store compare it."""
        decides = [(name, getattr(self, name)) for name in sorted(fields_of(Settings))]
        return hashlib.sha256(repr(decides).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, repr=False)
class ServedSettings(BrokerSettings, SpokenSettings):
    """What a process that serves a fleet, or a site, has beside what it asks of devices."""

    bundle: Annotated[
        tuple[str, ...],
        Option("The fleet's bundle; again for each further backbone that devices may have, and for any it extends."),
    ]
    store: Annotated[
        Any,
        Option(
            "The run: a SQLite file, or postgresql://user@host/db; made, or resumed.",
            check=_store,
            metavar=PLACE,
            url=True,
        ),
    ]
    sign: Annotated[
        str | None,
        Option("Ed25519 private key file that signs all that is published: client --trust.", metavar="KEY"),
    ] = None
    take_over: Annotated[
        bool, Option("End another aggregator that serves this fleet, instead of refusing.", only_typed=True)
    ] = False
    metrics: Annotated[
        str | None,
        Option(
            "Serve metrics for Prometheus; PORT alone: to this machine.",
            check=_metrics,
            metavar="[HOST:]PORT",
            absent="none",
        ),
    ] = None
    json: Annotated[str | None, Option(JSON_HELP.format("the run's summary, after every round,"))] = None


@dataclass(frozen=True, kw_only=True, repr=False)
class AggregateSettings(ServedSettings, Settings, command="aggregate"):
    """The settings of `protofleet aggregate`, and of `protofleet.Aggregator`."""

    patience: Annotated[
        float | None,
        Option(
            "Seconds to wait for the broker at the start.",
            low=0.1,
            high=1e6,
            absent="60; for ever with --every or --when-new",
        ),
    ] = None
    crl: Annotated[str | None, Option("PEM file of the broker's revocation list; warn before it expires.")] = None
    page: Annotated[
        str | None,
        Option(
            "Show the fleet in a browser; 0.0.0.0:8080 for a network.",
            check=checked_page,
            metavar="[ADDRESS:]PORT",
            absent="none",
        ),
    ] = None
    page_cert: Annotated[str | None, Option("PEM file of a certificate of the page's, for https.")] = None
    page_key: Annotated[str | None, Option("PEM file of its private key.")] = None
    allow_control: Annotated[
        str | None,
        Option(
            "Take orders on the page from who has a token of this file (NAME:TOKEN lines); made if absent.",
            metavar="FILE",
            absent="it takes none",
        ),
    ] = None
    worker: Annotated[
        bool,
        Option("One of any number of processes with one --store postgresql://… and broker; one leads at a time."),
    ] = False
    new_run: Annotated[bool, Option("Go on as a new run: for a store from a backup.", only_typed=True)] = False

    def check(self) -> None:
        super().check()
        check_page_files(self.page, self.page_cert, self.page_key)
        if self.allow_control is not None and self.page is None:
            raise UsageError("--allow-control", expected="--page beside it", got="none")
        if self.allow_control is not None and not (self.page_cert or read_page(self.page or "").is_local):
            got = "a network that can listen to the token"
            raise UsageError("--allow-control", expected="--page-cert beside it, or --page PORT", got=got)

    @property
    def address(self) -> Address:
        """The broker's address.

        Raises:
            UsageError: the URL cannot be read, or a certificate file is of no use.
        """
        return Address.parse(self.broker, ca_file=self.ca, cert_file=self.cert, key_file=self.key, crl_file=self.crl)


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddedBrokerSettings(SpokenSettings, command="broker"):
    """The settings of `protofleet broker`."""

    listen: Annotated[
        str,
        Option("HOST:PORT to listen on; port 0 for a free one."),
    ] = "127.0.0.1:1883"
    password_file: Annotated[
        str | None,
        Option("Lets in only who gives a password of this file, of USER:PASSWORD lines.", metavar="FILE"),
    ] = None


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
    method, able = find_method(own_method(manifest, settings)), [m.name for m in METHODS.values() if m.stands]
    if not method.stands:
        raise UsageError(
            "--standing",
            expected=f"a method whose sums add up over the bundle's extractor: {' or '.join(able)}",
            got=method.name,
            hint=f"--method {able[-1]}",
        )
    if any(used.mechanism(manifest.hyper) is not None for used in (find_method(manifest.method), method)):
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
    if not settings.gateway:
        return
    for method in map(find_method, dict.fromkeys(methods)):
        if not adds_up(method, method.resolved_in(manifest.hyper)):
            able = [m.name for m in METHODS.values() if adds_up(m, m.resolved_in({}))]
            raise UsageError(
                "--gateway",
                expected=f"rounds whose result is a sum: {', '.join(able)}",
                got=f"{method.name}, which weighs devices one by one, hides them in noise, or sends no sums",
            )


def least_limit_of(manifest: Manifest) -> int:
    """The smallest message limit: one class row of every kind must fit, since rows are not cut."""
    method = find_method(manifest.method)
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
    unused = head_options - {name for each in named for name in find_method(each).solved_with}
    if unused:
        options = ", ".join(f"--{name}" for name in sorted(unused))
        got = f"rounds of {', '.join(named)}"
        raise UsageError(options, expected="a round whose head is made with it", got=got, hint="leaving it out")
