"""What leaves a device passes here: the policy is asked before it is made, the ledger is told before it is sent.

For what an announcement asks for, in order:

1. `narrowed`: the larger of the announced and the policy's `min_samples` holds.
2. `refusal` checks method, statistic and encoding, and how many releases there may be in a day. Where the policy has an
   ε, it checks that this release has an ε, and that the sum stays within the policy's.
3. `made` writes what was computed into the ledger, with its cost, durably. Then the journal keeps it. Then it is sent.

Guarantees:

- A refusal follows from policy, announcement, bundle and ledger. It follows from no sample, except what a mechanism
  takes as public (FedHKD: how many samples there are of each class). So a refusal can be told.
- A crash during step 3 leaves a row for bytes that have not left. The repeated round makes the same bytes and finds
  this row. A noised round is not made again.
- Of a blinded round the ledger has the sums, not the share, because the next share of the same sums is another one.

A device that refuses a round answers it without any row (`Device.abstain`), so that nobody waits for it. `figures`
handles figures in a status. `may_send` handles what an earlier process left in the outbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import PrivacyError, UsageError, WireError
from protofleet.contract.methods import METHODS, Method, Value, method
from protofleet.contract.printable import counted
from protofleet.contract.privacy.mechanism import Mechanism
from protofleet.contract.sums.statistics import Participation
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Contribution, Encoding
from protofleet.edge_client.device.own_samples import HoldOut
from protofleet.edge_client.journal.journal import Journal, Key, read_contributed, read_terms
from protofleet.edge_client.privacy.accountant import Accountant, cost_of
from protofleet.edge_client.privacy.elapsed_time import Moment, moment
from protofleet.edge_client.privacy.ledger import FILE, Cost, Entry, Ledger, Spent, Terms, What, digest_of
from protofleet.edge_client.privacy.policy import Neighbours, Policy, Recorded, Refusal, looser, read_record

__all__ = ["Releases", "ledger_path"]

_RELATIONS: tuple[Neighbours, ...] = ("add-remove", "replace")
_IN_WORDS = {"add-remove": "one sample more or fewer", "replace": "one sample replaced"}


class Releases:
    """What one device releases, as long as one bundle runs.

    Args:
        policy: of its owner.
        ledger: open.
        fleet: the fleet that it is in.
        own: the bundle's method.
        hyper: the bundle's hyper-parameters.
        now: what time it is.

    Attributes:
        policy: as given.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        *,
        fleet: str,
        own: Method,
        hyper: Mapping[str, Value],
        now: Callable[[], Moment] = moment,
    ) -> None:
        self.policy, self._ledger, self._fleet, self._own, self._hyper = policy, ledger, fleet, own, hyper
        self._now = now
        self._figures: Mapping[str, float | str] = {}
        self._last, self._noised, self._missing = Cost(), False, 0
        self._journal: Journal | None = None
        delta = policy.delta if policy.delta is not None else hyper.get("delta")
        stated = policy.is_private or self._mechanism(own) is not None
        self._accountant = Accountant(float(delta)) if stated and delta is not None else None

    def begin(self, journal: Journal, *, others: Iterable[Path] = (), accepts_looser: bool = False) -> None:
        """Check what has to hold at a start.

        1. The policy is no looser than the last one.
        2. The ledger holds all that the journals hold.
        3. The policy's ε can hold at all.

        Args:
            others: directories of the journals of other fleets that this device was in.
            accepts_looser: whether the owner says that looser terms are meant.

        Raises:
            PrivacyError: the policy has an ε, and there are releases for which no ε holds.
            UsageError: the policy is looser than the terms on record; or there is an ε to state, and `dp-accounting` is
                not installed.
            StoreError: the disk refused.
        """
        self._journal, others = journal, list(others)
        texts = self._ledger.policy(), journal.policy(), *map(read_terms, others)
        known = self._on_record(*texts, skips=accepts_looser)
        for record in () if accepts_looser else known:
            self._check_terms(record.policy)
        contributed = [(self._fleet, journal.contributed()), *map(read_contributed, others)]
        self._missing = sum(self._ledger.record_missing(fleet, keys, self._now()) for fleet, keys in contributed)
        needed = self._accountant is not None
        for name, is_noised in self._ledger.noised().items():
            self._noised |= is_noised
            if name in METHODS:
                self._note_noise(METHODS[name])
        delta = None if self._accountant is None else self._accountant.delta
        self._ledger.put_terms(Terms(self.policy.epsilon, delta, self.policy.neighbours))
        spent = self._ledger.spent()
        if self.policy.is_private:
            bare = spent.of(self.policy.neighbours)[1]
            if bare:
                raise PrivacyError(
                    f"epsilon = {self.policy.epsilon:g} in the policy cannot hold",
                    expected=f"a ledger in which every release has its ε for {_IN_WORDS[self.policy.neighbours]}",
                    got=counted(bare, "release") + " without",
                    hint="a new --state for samples of which nothing has left yet, or no epsilon",
                )
        if needed and self._accountant is not None:
            self._accountant.look_ahead([(1.0, 0.0)])  # so that a package that is missing is known now
        terms = known[0] if known else Recorded(1, self.policy)
        terms = next((record.followed_by(self.policy) for record in known if record.policy != self.policy), terms)
        self._ledger.put_policy(terms.text())
        journal.put_policy(terms.text())

    @staticmethod
    def _on_record(*texts: str | None, skips: bool) -> list[Recorded]:
        """The latest terms on record; several where no number tells which are later, as of two devices' files.

        Args:
            skips: what cannot be read.

        Raises:
            UsageError: there are some that this program cannot read.
        """
        records = list[Recorded]()
        for text in texts:
            try:
                records += [] if text is None else [read_record(text)]
            except ValueError as error:
                if not skips:
                    raise UsageError(
                        "the policy's terms on record",
                        expected="terms that this program knows",
                        got=error,
                        hint="client --accept-looser-policy, once, where the policy is as it should be",
                    ) from None
        latest = max((record.change for record in records), default=0)
        return [record for record in records if record.change == latest]

    def _check_terms(self, before: Policy) -> None:
        looser_keys = looser(self.policy, before)
        if looser_keys:
            raise UsageError(
                "the policy is looser than when this device last started",
                expected=_terms_text(before, looser_keys),
                got=_terms_text(self.policy, looser_keys),
                hint="--policy with the file that is meant, or once client --accept-looser-policy",
            )

    def hold_out(self, asked: Announcement | None = None) -> HoldOut:
        """Which photos are held out of a contribution, to test with, so that its ε holds for all photos of the folder.

        Args:
            asked: the contribution is for it; None for none yet.
        """
        wanted = () if asked is None else (method(asked.method),)
        mechanisms = [mechanism for mechanism in map(self._mechanism, (self._own, *wanted)) if mechanism is not None]
        if any(mechanism.release(np.ones(1, np.int64)).public for mechanism in mechanisms):
            return "nothing"
        return "each alone" if mechanisms or self.is_private else "of each class"

    # ── before it is made ───────────────────────────────────────────────────────────────────────────────────────────

    def narrowed(self, asked: Announcement) -> Announcement:
        """What is announced, with no smaller `min_samples` than the policy's."""
        return replace(asked, min_samples=max(asked.min_samples, self.policy.min_samples))

    def refusal(self, asked: Announcement, counts: NDArray[np.integer]) -> Refusal | None:
        """Why an announced contribution is not made; None where it may be made.

        Args:
            counts: (C,) samples of each class, for a mechanism to which they are public.
        """
        asked_method = method(asked.method)
        refused = self.policy.refusal(asked, asked_method.statistic) or self._threshold(asked_method)
        refused = refused or self._over_budget(asked_method, counts) or self._once(asked_method, asked)
        return refused or (None if self.stands(asked) else self._too_often())

    @staticmethod
    def stands(asked: Announcement) -> bool:
        """Whether the announcement asks for sums that stand.

        Such sums wait for their time (`wait_s`), and are not left out.
        """
        return asked.phase == "standing"

    def wait_s(self) -> float:
        """Seconds until the policy lets another contribution be made; 0 where it does now."""
        window_s = self.policy.window_s
        return 0.0 if window_s is None else self._ledger.free_in_s(self.policy.most, window_s, self._now())

    def _too_often(self) -> Refusal | None:
        wait_s = self.wait_s()
        if not wait_s:
            return None
        most = f"{self.policy.releases_per_day:g} in a day"
        return Refusal("releases per day", f"the policy allows {most}, the next in {wait_s / 3600:.1f} h")

    def _once(self, asked_method: Method, asked: Announcement) -> Refusal | None:
        """Refuse to make a noised round twice.

        It is made once also by a device that was killed before its journal had it, or whose state directory is an older
        copy. Whether a second release has the same bytes would tell whether the samples have changed. Where sums stand,
        each change would be a release of its own.
        """
        if self._mechanism(asked_method) is None:
            return None
        if self.stands(asked):
            return Refusal(
                "standing", f"sums of {asked_method.name} do not stand: each change would be a release of its own"
            )
        if not self._ledger.has_release(self._fleet, asked.run, asked.round, asked.method):
            return None
        return Refusal("released already", "the ledger has a release of it, and noise is drawn once for each round")

    def _threshold(self, asked_method: Method) -> Refusal | None:
        """Refuse noise that hides how many samples there are, where small classes are to be kept back.

        Such noise cannot keep small classes back, too. The policy has to have an ε that bounds it. Otherwise a bundle
        with hardly any noise would lift the policy's `min_samples`.
        """
        if self.policy.min_samples <= 1 or self.policy.is_private or asked_method.statistic.COUNTED:
            return None
        kept = f"the policy keeps classes below {self.policy.min_samples} here"
        line = f"{asked_method.name} sends every class, with noise, {kept}"
        return Refusal("min_samples", f"{line}; with epsilon in it, noise may take the place of that")

    def _over_budget(self, asked_method: Method, counts: NDArray[np.integer]) -> Refusal | None:
        policy, accountant = self.policy, self._accountant
        if policy.epsilon is None or accountant is None:
            return None
        cost = self._cost(asked_method, counts)
        more = cost.replace if policy.neighbours == "replace" else cost.add_remove
        if more is None:
            return Refusal("no epsilon", f"the policy asks an ε of every release, {self._why_none(asked_method)}")
        known = self._ledger.spent()
        accountant.look_ahead(_both(known, cost))
        spent, _ = known.of(policy.neighbours)
        then = accountant.epsilon(spent + more)
        if then > policy.epsilon:
            so_far = f"ε = {accountant.epsilon(spent):.3g} of {policy.epsilon:g} is spent"
            return Refusal("epsilon is spent", f"{so_far}, and it would be {then:.3g} with this release")
        return None

    def _why_none(self, asked_method: Method) -> str:
        """Why a method has no ε for the policy's neighbours."""
        mechanism = self._mechanism(asked_method)
        if mechanism is None:
            able = ", as this bundle has it" if "noise" in asked_method.hyper else ""
            return f"{asked_method.name} adds no noise{able}"
        return f"{asked_method.name} has none for {_IN_WORDS[self.policy.neighbours]}"

    def _mechanism(self, asked_method: Method) -> Mechanism | None:
        return asked_method.mechanism(asked_method.resolved_in(self._hyper))

    def _cost(self, asked_method: Method, counts: NDArray[np.integer]) -> Cost:
        if issubclass(asked_method.statistic, Participation):
            return Cost(0.0, 0.0)  # it says nothing of the samples
        return cost_of(self._mechanism(asked_method), counts)

    # ── before it is sent ───────────────────────────────────────────────────────────────────────────────────────────

    def encoded(self, contribution: Contribution, asked: Announcement) -> tuple[bytes, Encoding] | None:
        """The contribution in the encoding that it travels in.

        It is encoded as announced, or in f32 where its numbers do not fit that (float16 ends at 65,504). None where
        they do not fit, and the policy does not allow f32.
        """
        try:
            return encode(contribution, asked.encoding), asked.encoding
        except WireError:
            return (encode(contribution, "f32"), "f32") if self.policy.allows_encoding("f32") else None

    def made(self, asked: Announcement, encoding: Encoding, payload: bytes, counts: NDArray[np.integer]) -> None:
        """A contribution was made of the samples. It may be sent on return, and not before.

        Args:
            encoding: that it travels in.
            counts: as for `refusal`.

        Raises:
            StoreError: the disk refused.
        """
        self._note_noise(method(asked.method))
        what: What = "standing" if self.stands(asked) else "round" if asked.helper is None else "blinded"
        self._record(what, asked, encoding, payload, self._cost(method(asked.method), counts))

    def _note_noise(self, asked_method: Method) -> None:
        """Note that noise was added: `aggregate --method` may ask for noise that the bundle's own method does not add.

        From then on nothing is told without noise, and the ε is stated.
        """
        if self._mechanism(asked_method) is None:
            return
        self._noised = True
        delta = asked_method.resolved_in(self._hyper).get("delta")
        if self._accountant is None and delta is not None:
            self._accountant = Accountant(float(delta))

    def abstained(self, asked: Announcement, payload: bytes) -> None:
        """A contribution was made that says nothing of the samples. It may be sent on return.

        Raises:
            StoreError: the disk refused.
        """
        self._record("sat-out", asked, asked.encoding, payload, Cost(0.0, 0.0))

    def withheld(self, asked: Announcement, payload: bytes, counts: NDArray[np.integer]) -> None:
        """A contribution was made of the samples, and its numbers did not fit an allowed encoding.

        That it did not fit is told, and follows from the samples. So it costs what the contribution would have cost.

        Args:
            payload: what goes out instead.
            counts: as for `refusal`.

        Raises:
            StoreError: the disk refused.
        """
        asked_method = method(asked.method)
        self._note_noise(asked_method)
        what: What = "sat-out" if self._mechanism(asked_method) is None else "round"
        self._record(what, asked, asked.encoding, payload, self._cost(asked_method, counts))

    def figures(self, figures: Mapping[str, float | str]) -> None:
        """A status is about to tell these figures, which are computed from samples. It may be sent on return.

        Raises:
            StoreError: the disk refused.
        """
        if not figures or figures == self._figures:
            return
        payload = json.dumps(dict(sorted(figures.items()))).encode()
        digest = digest_of(b"figures", self._fleet.encode(), payload)
        names = ", ".join(sorted({name.partition("_")[0] for name in figures}))
        entry = Entry("figures", self._fleet, b"", 0, "", names, "", 1, len(payload), digest, Cost())
        self._ledger.record(entry, self._now())
        if self._journal is not None:
            self._journal.note_figures()
        self._figures = dict(figures)

    def may_send(self, key: Key) -> str:
        """Why a contribution of an earlier start is not sent any more under this policy; empty where it is sent.

        Args:
            key: of the contribution that waits.
        """
        name, entry = key[2], self._ledger.newest(self._fleet, *key)
        if entry is not None and entry.what == "sat-out":
            return ""
        statistic = METHODS[name].statistic.NAME if name in METHODS else ""
        policy, encoding = self.policy, "" if entry is None else entry.encoding
        for allowed, got in ((policy.methods, name), (policy.statistics, statistic), (policy.encodings, encoding)):
            if allowed is not None and got not in allowed:
                return f"{got or 'what it is of'} is not in the policy any more"
        if policy.min_samples > 1 and (entry is None or entry.min_samples < policy.min_samples):
            return f"it was made with classes below {policy.min_samples} samples"
        return ""

    def _record(self, what: What, asked: Announcement, encoding: Encoding, payload: bytes, cost: Cost) -> None:
        a, statistic = asked, method(asked.method).statistic.NAME
        facts = (self._fleet, a.run, a.round, a.method, statistic, encoding, a.min_samples)
        self._ledger.record(Entry(what, *facts, len(payload), digest_of(payload), cost), self._now())
        self._last = cost if what != "sat-out" else self._last

    # ── what is told ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_private(self) -> bool:
        """Whether only noised contributions may be told.

        That is so where the policy has an ε, where the bundle's method adds noise, and where any release of any start
        had noise.
        """
        return self.policy.is_private or self._noised or self._mechanism(self._own) is not None

    def warning(self) -> str:
        """What its owner should know at the start; empty for nothing."""
        if self._missing and self.policy.releases_per_day is not None:
            lost = f"the ledger lacks {counted(self._missing, 'release')} that the journal has"
            return f"{lost}: releases_per_day counts them as made now, the next in {self.wait_s() / 3600:.1f} h"
        if not self.policy.is_private or self._mechanism(self._own) is not None:
            return ""
        if issubclass(self._own.statistic, Participation):
            return ""
        able = ", ".join(name for name, entry in METHODS.items() if entry.mechanism(entry.resolve({})) is not None)
        rounds = f"rounds of {self._own.name}, the bundle's own method,"
        return f"{rounds} add no noise: the policy's epsilon refuses them, and takes {able}"

    def cost_line(self) -> str:
        """What all releases so far have cost, for a person; empty where no ε is to be stated."""
        if self._accountant is None:
            return ""
        spent = self._ledger.spent()
        relation = self._relation(spent)
        if relation is None:
            return f"no ε holds: without noise went out {counted(self._bare(spent), 'release')}"
        budget = "" if self.policy.epsilon is None else f" of {self.policy.epsilon:g}"
        try:
            self._accountant.look_ahead(_both(spent, self._last))
        except UsageError as error:  # a bundle of another method did not say at the start that it would be needed
            return f"no ε is stated: {error}"
        after = f"after {counted(spent.releases, 'release')}"
        epsilon = self._accountant.epsilon(spent.of(relation)[0])
        its = " by another of its class" if relation == "replace" and spent.is_by_class else ""
        return f"ε = {epsilon:.3g}{budget} at δ = {self._accountant.delta:g} for {_IN_WORDS[relation]}{its} {after}"

    def facts(self) -> dict[str, Any] | None:
        """What `--json` says of it; `epsilon` is null where none holds. None where no ε is to be stated."""
        if self._accountant is None:
            return None
        spent, known = self._ledger.spent(), self._accountant
        relation = self._relation(spent)
        try:
            known.look_ahead(_both(spent, self._last))
        except UsageError:  # as in `told`
            if self.policy.is_private or self._mechanism(self._own) is not None:
                raise
            return None
        by = {name: None if spent.of(name)[1] else known.epsilon(spent.of(name)[0]) for name in _RELATIONS}
        return {
            "epsilon": None if relation is None else by[relation],
            "epsilon_add_remove": by["add-remove"],
            "epsilon_replace": by["replace"],
            "delta": known.delta,
            "budget": self.policy.epsilon,
            "neighbours": relation,
            "of_its_class": spent.is_by_class,
            "releases": spent.releases,
            "releases_without_noise": self._bare(spent),
        }

    def _relation(self, spent: Spent) -> Neighbours | None:
        """That which ε is stated for: the policy's, or the first for which it holds."""
        if self.policy.is_private:
            return self.policy.neighbours
        return next((name for name in _RELATIONS if not spent.of(name)[1]), None)

    @staticmethod
    def _bare(spent: Spent) -> int:
        return min(spent.bare_add_remove, spent.bare_replace)


def _terms_text(policy: Policy, names: Iterable[str]) -> str:
    """Some terms of a policy, as its file has them."""
    values = {name: getattr(policy, name) for name in names}
    texts = {
        name: "any" if value is None else " or ".join(value) or "none" if isinstance(value, tuple) else str(value)
        for name, value in values.items()
    }
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def ledger_path(state: Path, policy: Policy) -> Path:
    """Where the ledger of a state directory lies."""
    return state / FILE if policy.ledger is None else Path(policy.ledger)


def _both(spent: Spent, cost: Cost) -> list[tuple[float, float]]:
    """For each relation for which ε holds so far: what is spent, and what a release like the last adds."""
    added = {"add-remove": cost.add_remove or 0.0, "replace": cost.replace or 0.0}
    return [(spent.of(name)[0], added[name]) for name in _RELATIONS if not spent.of(name)[1]]
