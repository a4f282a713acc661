"""What a coordinator runs: the fleet's bundles and settings, and what follows from them for a method. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protofleet.aggregator.ingest.validation import ClassLists
from protofleet.aggregator.settings import Settings, least_limit_of
from protofleet.contract.bundle.bundle_file import Manifest, extractor_of
from protofleet.contract.bundle.fleet_compatibility import further_bundles
from protofleet.contract.methods import Method, Value
from protofleet.contract.wire.messages import Encoding

__all__ = ["FleetTerms"]


@dataclass
class FleetTerms:
    """Of one fleet.

    Attributes:
        manifest, bundle: of the fleet's bundle, and its sha256 (32 bytes).
        settings: of the aggregator; a gateway's change with what is announced above it.
        others: sha256 of further bundles that agree with it, as checked by
            `protofleet.contract.bundle.fleet_compatibility`.
        shorter: the bundles of the same extractor that it extends: sha256 and number of classes.
        lists: the lists of classes that these bundles have.
    """

    manifest: Manifest
    bundle: bytes
    settings: Settings
    others: tuple[bytes, ...] = ()
    shorter: Mapping[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lists = ClassLists.of(self.manifest, self.bundle, self.shorter)

    @property
    def further(self) -> tuple[bytes, ...]:
        """The bundles beside the fleet's own that devices may have, as announced."""
        return further_bundles(self.others, self.shorter)

    @property
    def limit_bytes(self) -> int:
        """The largest message taken and sent."""
        return self.settings.limit_bytes

    @property
    def least_limit_bytes(self) -> int:
        """The smallest message limit that leaves room for a class row."""
        return least_limit_of(self.manifest)

    def encoding(self, method: Method) -> Encoding:
        """How tensors of a method travel."""
        if method.encoding != "f64":
            return self.settings.encoding
        return "f64" if self.settings.sums_encoding == "factor" else self.settings.sums_encoding

    def factors(self, method: Method) -> bool:
        """Whether devices may send a factor in place of a method's triangle."""
        return self.settings.sums_encoding == "factor" and method.statistic.takes_factor()

    def extractor(self, method: Method) -> bytes:
        """The extractor whose features a method sums; empty where each device has its own."""
        return extractor_of(self.manifest, self.bundle, method)

    def hyper(self, method: Method) -> dict[str, Value]:
        """The hyper-parameters of a method: the bundle's, and what is taken instead."""
        chosen = {name: value for name, value in self.settings.hyper.items() if name in method.hyper}
        return method.resolved_in({**self.manifest.hyper, **chosen})

    def width(self, method: Method) -> int:
        """The width of a method's rows: that of the features, or of what the method makes of them."""
        return method.row_width(self.hyper(method), self.manifest.features)
