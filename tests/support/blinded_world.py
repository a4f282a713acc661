"""A store, a ledger, and device, aggregator and helper on them in one process, killed between any two steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from aggregator_samples import BUNDLE, CLASSES, contribution, gram, manifest
from blinded_samples import FLEET, PUBLIC, enrolled, helper, names, signer
from blinded_samples import ledger as open_ledger
from pooled_head import usual_head

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.helper.opening import Answer
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import extractor_of
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Opened as HelperOpened
from protofleet.contract.wire.messages import Status
from protofleet.edge_client.privacy.blinded_shares import Blinding

LEAST, DEVICES = 3, names(5)
SETTINGS = Settings(
    method="ffc",
    rounds=3,
    calibrate=False,
    min_clients=LEAST,
    deadline=60.0,
    helper=PUBLIC,
    least=LEAST,
    ridge=1e-3,
)
PLAIN = manifest(name="ncm")


def blinding(device: str) -> Blinding:
    return Blinding(PLAIN, fleet=FLEET, device=device, helper=PUBLIC, signer=signer(device))


class World:
    """A store, a ledger and whoever runs on them now."""

    def __init__(self, folder: Path, settings: Settings = SETTINGS, least: int = LEAST) -> None:
        self.folder, self.settings, self.least, self.now = folder, settings, least, 0.0
        self.start()

    def start(self, online: tuple[str, ...] = tuple(DEVICES)) -> None:
        self.store = DurableStore(self.folder / "store", BUNDLE, FLEET)
        self.core = rounds_of(self.store, PLAIN, BUNDLE, self.settings, now=self.now)
        self.ledger = open_ledger(self.folder / "ledger")
        self.helper = helper(self.ledger, enrolled(*DEVICES), self.least)
        for device in online:
            self.core.status(device, encode(Status(True, b"instance", 1)), self.now)
        self.now += 10.0

    def kill(self) -> None:
        self.store.close()
        self.ledger.close()
        self.start()

    def steps(self) -> list[object]:
        made = []
        while (step := self.core.advance(self.now, 1000.0 + self.now)) is not None:
            made.append(step)
        return made

    def statistic(self, device: str) -> FeatureGram:
        return gram(DEVICES.index(device))

    def message(self, device: str, statistic: FeatureGram | None = None) -> bytes:
        """What a device sends for the open round."""
        a = decode(encode(self.core.announcement()))
        plain = contribution(
            statistic or self.statistic(device),
            run=self.core.parts.run,
            round=a.round,
            method="ffc",
            extractor=extractor_of(PLAIN, BUNDLE, method("ffc")),
        )
        each = blinding(device)
        each.check(a)
        return encode(each.blinded(plain, a))

    def send(self, *devices: str) -> list[str]:
        decisions = self.core.take([(device, self.message(device)) for device in devices], self.now)
        return [decision.outcome for decision in decisions]

    def ask(self) -> Answer | None:
        """Ask the helper as the line does, and lose its answer."""
        answer = None
        for part in self.core.helper.asks(600):  # a device or two in each message
            answer = self.helper.take(decode(encode(part)), self.now) or answer
        return answer

    def answered(self, answer: Answer, each: int = 4) -> None:
        """Hear the answer in parts, the last one first."""
        a = answer.asked
        key = (a.run, a.round, a.method, a.digest)
        if answer.total is None:
            parts = [HelperOpened(*key, 0, 1, "refused", np.zeros(0, np.uint64), answer.reason, answer.refused)]
        else:
            cuts = [answer.total[n : n + each] for n in range(0, len(answer.total), each)]
            parts = [HelperOpened(*key, n, len(cuts), "opened", cut) for n, cut in enumerate(cuts)]
        for part in reversed(parts):
            self.core.helper.hear(decode(encode(part)))

    def round(self, *devices: str) -> list[object]:
        """One whole round of these devices."""
        made = self.steps()
        self.send(*devices)
        for device in set(DEVICES) - set(devices):
            self.core.status(device, encode(Status(False, b"instance", 1)), self.now)
        made += self.steps()
        for _ in range(3):
            if self.core.helper.asked is not None:
                self.answered(self.ask())
                made += self.steps()
        return made

    def head(self) -> np.ndarray:
        return self.core.state.head.rows


def pooled(world: World, *devices: str) -> np.ndarray:
    total = FeatureGram.zero(CLASSES, PLAIN.features)
    for device in devices:
        total = total.merge(world.statistic(device))
    return usual_head(total, 1e-3)


def abstention(world: World, numbers: FeatureGram | None = None) -> bytes:
    """What a device sends whose owner's policy refuses the open round; or, in its place, these numbers."""
    nothing = FeatureGram.zero(CLASSES, PLAIN.features)
    told = {"run": world.core.parts.run, "method": "ffc", "extractor": extractor_of(PLAIN, BUNDLE, method("ffc"))}
    made = contribution(nothing if numbers is None else numbers, **told)
    return encode(replace(made, triangle=None) if numbers is None else made)
