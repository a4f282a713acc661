"""How large an ε an attack can show of the noised methods, beside the one that is stated.

    pip install dp-accounting
    python -m benchmarks.privacy.epsilon_audit [--trials 20000] [--multiplier 2 1 0.5]
    python -m benchmarks.privacy.epsilon_audit --from-folder [--epsilon 1] [--trials 20000]

The attacker knows every photo of a device but one, and asks of each of many releases whether that one is in it: by the
likelihood ratio over every number that leaves, which is the best test there is. Its sample is the worst there is, too:
of a class that nobody else has. From the shares of right and wrong accusations follows ε ≥ ln((true − δ) / false);
printed for each δ is the largest over thresholds, of 99 % Clopper-Pearson bounds that allow for their number
(Bonferroni). Thresholds are set on other releases than those that are counted. Beside it is the ε that is stated for
that δ, and what the same attack shows of a mechanism that adds half the noise and one that leaves the counts as they
are: these have to be found out.

Releases are those of the deployed methods, with their own noise from secrets of their own.

With `--from-folder` the two data sets are two folders of image files, of which one has a photo more, and the client's
own reading of them with its defaults (`edge_client/device/own_samples.py`) says what is summed; features are made of
the pixels. The attacker knows both folders and the key by which photos are drawn, tries some photos, and attacks that
which moves most. Folders are ordinary ones of ten classes, and ones of a hundred classes of four to nine photos.
Beside what is shipped stands the same client that holds out a share of each class, which it does without noise: it has
to be found out where it shows more than is stated.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from dp_accounting import get_epsilon_gaussian
from numpy.typing import NDArray
from PIL import Image
from scipy.optimize import brentq
from scipy.stats import beta

from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest
from protofleet.contract.methods import method
from protofleet.contract.privacy import noised_sums
from protofleet.contract.privacy.noised_sums import SumNoise
from protofleet.contract.privacy.secret_noise import SecretNoise, key_of
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.sums.statistics import Statistic
from protofleet.edge_client.device.own_samples import HoldOut, OwnSamples
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.settings import ClientSettings

CLASSES, WIDTH, OTHERS = 4, 8, 12
DELTAS = (1e-5, 1e-3, 1e-2)
FOLDERS = {  # the number of photos of each class
    "10 classes, nine of 45 photos, one of 4": [45, 45, 4, *[45] * 7],
    "100 classes of 4 to 9 photos, 90 of them of 5": [5] * 90 + [4, 4, 4, 4, 6, 6, 7, 7, 8, 9],
}
SIDE, TRIED = (4, 4), 30
QUANTILES = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
Data = tuple[NDArray[np.float32], NDArray[np.int64]]


class Attacked:
    """One device's samples, as a method sees them, with a secret of its own for each release."""

    min_samples, params = 1, dict[str, Any]()

    def __init__(self, hyper: dict[str, Any], data: Data, secret: bytes, classes: int) -> None:
        self.hyper, self._data, self._secret = hyper, data, secret
        self.classes, self.width, self.asked = classes, data[0].shape[1], np.ones(classes, bool)
        self.counts = np.bincount(data[1], minlength=classes)

    def features(self, extractor: str) -> Iterator[Data]:
        """All at once."""
        yield self._data

    def secret_noise(self, *of: bytes | NDArray[np.generic]) -> SecretNoise:
        """As on a device."""
        return SecretNoise(key_of(self._secret, *of))


def main() -> None:
    """Print a table."""
    options = _options()
    if options.from_folder:
        _from_folders(options.epsilon, options.trials)
        return
    print(
        "| method | m | stated ε at δ = " + ", ".join(f"{d:g}" for d in DELTAS) + " | mechanism | shown ε at these δ |"
    )
    print("| --- | --- | --- | --- | --- |", flush=True)
    whole = noised_sums._noised
    broken = {
        "as it is": mock.patch.object(noised_sums, "_noised", whole),
        "half the noise": mock.patch.object(noised_sums, "_noised", lambda v, d, n: whole(v, 0.5 * d, n)),
        "counts bare": mock.patch.object(SumNoise, "noised_counts", lambda self, n, _: n.astype(np.float64)[:, None]),
    }
    for name in ("ffc-dp", "ncm-dp"):
        for multiplier in options.multiplier:
            stated = [get_epsilon_gaussian(multiplier, delta) for delta in DELTAS]
            for what, patch in broken.items():
                with patch:
                    shown = _shown(name, multiplier, options.trials, only_counts=what == "counts bare")
                cells = [", ".join(f"{value:.2f}" for value in row) for row in (stated, shown)]
                print(f"| {name} | {multiplier:g} | {cells[0]} | {what} | {cells[1]} |", flush=True)


def _shown(name: str, multiplier: float, trials: int, *, only_counts: bool) -> list[float]:
    """For each δ, what the attack shows; 0 where it shows nothing."""
    hyper = method(name).resolve({"noise_multiplier": multiplier})
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(OTHERS, WIDTH)).astype(np.float32), rng.integers(0, CLASSES - 1, OTHERS)
    more = np.concatenate([z, np.eye(WIDTH, dtype=np.float32)[:1]]), np.append(y, CLASSES - 1)
    return _told_apart(name, hyper, (z, y), more, CLASSES, trials, only_counts=only_counts)


def _told_apart(
    name: str, hyper: dict[str, Any], less: Data, more: Data, classes: int, trials: int, *, only_counts: bool = False
) -> list[float]:
    """For each δ, what the attack shows of releases of two data sets."""
    quiet = mock.Mock(whole_normal=lambda shape, deviation: np.zeros(shape, np.int64))
    with mock.patch.object(Attacked, "secret_noise", return_value=quiet):
        base, with_it = (_numbers(name, hyper, data, b"", classes) for data in (less, more))
    moved = with_it - base
    if only_counts:
        moved[:-classes] = 0.0

    def scores(data: Data, side: str, count: int) -> NDArray[np.float64]:
        secrets = (f"{side} {i}".encode() for i in range(count))
        return np.array([(_numbers(name, hyper, data, secret, classes) - base) @ moved for secret in secrets])

    thresholds = np.quantile(scores(less, "threshold", max(trials // 4, 200)), QUANTILES)
    false, true = scores(less, "without", trials), scores(more, "with", trials)
    level = 0.01 / (2 * len(QUANTILES))
    best = []
    for delta in DELTAS:
        found = [0.0]
        for threshold in thresholds:
            hits, wrong = int((true > threshold).sum()), int((false > threshold).sum())
            least = float(beta.ppf(level, hits, trials - hits + 1)) if hits else 0.0
            most = float(beta.ppf(1 - level, wrong + 1, trials - wrong)) if wrong < trials else 1.0
            found.append(math.log((least - delta) / most) if least > delta else 0.0)
        best.append(max(found))
    return best


def _numbers(name: str, hyper: dict[str, Any], data: Data, secret: bytes, classes: int) -> NDArray[np.float64]:
    """Every number that leaves, in units of the deviation of its own noise; the counts last."""
    width = data[0].shape[1]
    statistic: Statistic = method(name).summarise(Attacked(hyper, data, secret, classes))
    noise = method(name).mechanism(hyper)
    assert isinstance(noise, SumNoise)
    rows, sizes = (statistic.rows(field).ravel() for field in statistic.row_fields())
    parts = [rows / noise.row_deviation, sizes / noise.count_deviation]
    if statistic.triangle is not None:
        scale = np.full((width, width), math.sqrt(2.0))
        np.fill_diagonal(scale, 1.0)
        parts.insert(0, statistic.triangle * scale[np.triu_indices(width)] / noise.gram_deviation)
    return np.concatenate(parts)


# ── from the folder on ──────────────────────────────────────────────────────────────────────────────────────────────


def _from_folders(epsilon: float, trials: int) -> None:
    """Print a table of what is shown of releases of two folders."""
    multiplier = brentq(lambda m: get_epsilon_gaussian(m, DELTAS[0]) - epsilon, 0.1, 1000.0)
    stated = ", ".join(f"{get_epsilon_gaussian(multiplier, delta):.2f}" for delta in DELTAS)
    print(f"m = {multiplier:.4g}; stated ε at δ = {', '.join(f'{d:g}' for d in DELTAS)}: {stated}", flush=True)
    print("| folder | held out | photos moved by one, at most | ncm-dp: shown ε | ffc-dp: shown ε |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    rules: dict[str, HoldOut | None] = {"as shipped": None, "of each class": "of each class"}
    for what, sizes in FOLDERS.items():
        for name, rule in rules.items():
            less, more, moved = _worst(sizes, rule)
            shown = []
            for noised in ("ncm-dp", "ffc-dp"):
                hyper = method(noised).resolve({"noise_multiplier": multiplier})
                shown.append(", ".join(f"{e:.2f}" for e in _told_apart(noised, hyper, less, more, len(sizes), trials)))
            print(f"| {what} | {name} | {moved} | {shown[0]} | {shown[1]} |", flush=True)


def _worst(sizes: list[int], rule: HoldOut | None) -> tuple[Data, Data, int]:
    """What is summed of a folder, of the same with that photo more, of those tried, that moves most; and how many
    photos that moves. Those that are tried are of the smallest classes first."""
    rng, classes = np.random.default_rng(len(sizes)), np.argsort(sizes, kind="stable")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for label, size in enumerate(sizes):
            for _ in range(size):
                _draw_photo(place / "photos", label, rng)
        read = _reader(place, len(sizes), rule)
        before, found = read(), list[tuple[int, Data]]()
        for number in range(TRIED):
            extra = _draw_photo(place / "photos", int(classes[number % len(sizes)]), rng)
            after = read()
            found.append((_apart(before, after), after))
            extra.unlink()
        moved, after = max(found, key=lambda each: each[0])
    return before, after, moved


def _draw_photo(folder: Path, label: int, rng: np.random.Generator) -> Path:
    path = folder / str(label) / f"{rng.integers(2**60):x}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, SIDE, np.uint8)).save(path)
    return path


def _reader(place: Path, classes: int, rule: HoldOut | None) -> Callable[[], Data]:
    """Reads the folder as a client does whose bundle is of NCM-DP, with its defaults; `rule` instead of its own."""
    own, state = method("ncm-dp"), place / "state"
    manifest = Manifest(
        schema=SCHEMA, version=1, protofleet="0.2.0", backbone="pixels", provenance="of this benchmark",
        method=own.name, head=own.heads[0], hyper=own.resolve({}), labels=tuple(map(str, range(classes))),
        features=SIDE[0] * SIDE[1], input_shape=(*SIDE, 1), mean=(0.5,), std=(0.5,), batch=8, opset=18, state=(),
        members={},
    )  # fmt: skip
    named = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": str(place / "photos"), "state": str(state)}
    state.mkdir()
    with Ledger(state / "ledger.sqlite") as ledger:
        shipped = Releases(Policy(), ledger, fleet="fleet", own=own, hyper=manifest.hyper).hold_out()
    samples = OwnSamples(
        read_settings(ClientSettings, named),
        manifest,
        state,
        draw_key=bytes(32),
        rule=rule or shipped,
    )

    def read() -> Data:
        data = (samples.newer() or samples.read()).data
        return data.x.reshape(len(data), -1) - np.float32(127.5), data.y

    return read


def _apart(one: Data, other: Data) -> int:
    """How many samples one has and the other has not, and the other way round."""
    first, second = ({(z.tobytes(), int(y)) for z, y in zip(*data, strict=True)} for data in (one, other))
    return len(first ^ second)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--from-folder", action="store_true")
    parser.add_argument("--epsilon", type=float, default=1.0, help="stated at the first δ, with --from-folder")
    parser.add_argument("--multiplier", type=float, nargs="+", default=[2.0, 1.0, 0.5])
    return parser.parse_args()


if __name__ == "__main__":
    main()
