"""`protofleet advise`: on real photos, equal to what a fleet gives, with the bytes that a fleet sends."""

from __future__ import annotations

import dataclasses
import json
import re
import tracemalloc
from pathlib import Path
from typing import ClassVar

import fleets
import msgspec
import numpy as np
import pytest
from commands import run, run_process
from edge_samples import FASHION, FASHION_LABELS
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from protofleet.advice.advice import Advice, Measured, Plan, _doubts, _trained, advise, recommended
from protofleet.advice.frozen_fleet import FrozenFleet, deal, features_of
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.commands.advise import _show
from protofleet.contract.bundle.bundle_file import Bundle, StateTensor, read_bundle, write_bundle
from protofleet.contract.bundle.uplink_bytes import Rung, rungs, sent_bytes
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.base import Hyper
from protofleet.contract.methods.ffc import FFC
from protofleet.contract.sums.statistics import class_sums
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data, load_held_out
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal

DEVICES, CLASSES = 3, 10


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle) -> Bundle:
    return read_bundle(mnist_like_bundle("ncm"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, bundle: Bundle) -> Path:
    """Twenty-four shipped images of each class, as a user's folder of PNG files."""
    folder = tmp_path_factory.mktemp("photos")
    whole = load_data(FASHION / "train.parquet", bundle.manifest)
    for label, name in enumerate(FASHION_LABELS):
        place = folder / name.replace("/", "-")
        place.mkdir()
        for row in np.flatnonzero(whole.y == label)[:24]:
            Image.fromarray(whole.x[row, ..., 0]).save(place / f"{row}.png")
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, bundle: Bundle) -> Path:
    """The bundle with labels that can be folders' names."""
    labels = tuple(name.replace("/", "-") for name in FASHION_LABELS)
    return _written(tmp_path_factory.mktemp("bundle") / "f.bundle", bundle, labels=labels)


def _written(path: Path, bundle: Bundle, params: dict[str, np.ndarray] | None = None, **fields: object) -> Path:
    """The same graphs under another manifest, or with other weights."""
    manifest = msgspec.structs.replace(bundle.manifest, **fields)  # type: ignore[arg-type]
    weights = params or dict(bundle.params)
    write_bundle(path, manifest, features=bundle.features, train_step=bundle.train_step, params=weights)
    return path


def _told(path: Path, photos: Path, *options: object) -> dict:
    done = run("advise", "--bundle", path, "--data", photos, "--threads", 1, "--json", "-", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _refused(path: Path, photos: Path, *options: object) -> str:
    done = run("advise", "--bundle", path, "--data", photos, "--threads", 1, *options)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_photos_to_a_recommendation_on_a_narrow_terminal(path: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "advice.json"
    words = ("advise", "--bundle", path, "--data", photos, "--devices", DEVICES, "--json", out)
    done = run(*words, COLUMNS="60")
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 60 for line in done.stdout.splitlines())
    told = json.loads(out.read_text())
    copies, held_out = told["copies"], told["held_out"]
    assert told["schema"] == "protofleet.advise/1"
    assert copies <= 5, "shipped images differ, but some trousers are hard to tell apart"
    assert 240 - copies <= told["photos"] + held_out <= 240
    assert ("like another, or nearly" in " ".join(done.stdout.split())) == bool(copies)
    for step in ("reading photos", "comparing photos", "measuring ncm: ", "measuring ffc: "):
        assert f"{step}" in done.stderr, "a pipe is told each step, too"
    names = [way["way"] for way in told["ways"]]
    assert set(names) == {rung.name for rung in rungs(read_bundle(path).manifest)}
    assert {"ncm", "fedcof groups=1", "fedcof groups=2", "fedcof groups=4", "fedcof groups=8", "ffc"} <= set(names)
    for way in told["ways"]:
        row = re.compile(rf"{re.escape(way['way'])}( \*)? +[\d.]+ [kM]?B ")
        (line,) = [line for line in done.stdout.splitlines() if row.match(line)]
        assert f"{way['accuracy']:.1%}" in line
        assert f"{way['alone']:.1%}" in line
        if method(way["way"].split()[0]).statistic.COUNTED:  # else there is noise, which so few photos drown in
            assert way["accuracy"] > 0.4, "real features of real images tell ten classes apart"
        assert way["standard_error"] == pytest.approx(np.sqrt(way["accuracy"] * (1 - way["accuracy"]) / 48))
        assert (" * " in line) == (way["way"] == told["recommended"])
    sizes = [way["uplink_bytes"] for way in told["ways"]]
    assert sizes == sorted(sizes)
    said = " ".join(done.stdout.split())
    assert f"Take {told['recommended']}" in said
    assert "chosen on these held-out photos" in said
    assert "fedproto trains: 5.2 kB a round, not measured here" in said
    assert f"only {held_out} held-out photos" in said
    parts = load_held_out(photos, read_bundle(path).manifest, share=0.2)
    direct = advise(read_bundle(path), parts, Plan(DEVICES))
    assert told == json.loads(msgspec.json.encode(direct.as_json()))
    other = deal(parts[0].y, DEVICES, seed=5)
    assert any(list(a) != list(b) for a, b in zip(deal(parts[0].y, DEVICES), other, strict=True))


def test_it_needs_neither_torch_nor_onnx_nor_the_rooms_that_do(path: Path, photos: Path) -> None:
    code = (
        "import sys, atexit\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'onnx', 'jinja2', 'lab', 'export', 'pyarrow'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())"
    )
    done = run_process("advise", "--bundle", path, "--data", photos, "--photos", 120, code=code, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert re.match(r"9\d photos dealt to 5 devices, every class; measured on 2\d others\.", done.stdout)
    assert "Take " in done.stdout


def test_a_head_that_came_with_the_bundle_stands_beside(bundle: Bundle) -> None:
    """Here the class means, which are a fair head."""
    parts = load_held_out(FASHION / "train.parquet", bundle.manifest, most=200)
    made = [features_of(bundle, part) for part in parts]
    sums, counts = class_sums(unit_rows(made[0].x), made[0].y, CLASSES)
    means = (sums / counts[:, None]).astype(np.float32)
    state = (*bundle.manifest.state, StateTensor("head.weight", means.shape, "param"))
    weights = {**bundle.params, "head.weight": means}
    hyper = method("fedproto").resolve({})
    manifest = msgspec.structs.replace(bundle.manifest, method="fedproto", head="local", hyper=hyper, state=state)
    found = advise(dataclasses.replace(bundle, manifest=manifest, params=weights), parts, Plan(5, 2)).as_json()
    first = found["ways"][0]
    assert (first["way"], first["uplink_bytes"], first["alone"]) == ("bundle's own head", 0, None)
    z = unit_rows(made[1].x)
    assert first["accuracy"] == pytest.approx(((z @ means.T).argmax(axis=1) == made[1].y).mean())
    assert first["accuracy"] > 0.3
    plain = [way for way in found["ways"][1:] if method(way["way"].split()[0]).statistic.COUNTED]
    assert all(way["alone"] < 0.25 < way["accuracy"] for way in plain)  # who holds two of ten classes
    assert list(found["trained_not_measured"]) == ["fedproto"]


def test_few_photos_are_warned_of(path: Path, photos: Path, tmp_path: Path) -> None:
    for number, place in enumerate(sorted(photos.iterdir())[:3]):
        (tmp_path / "photos" / place.name).mkdir(parents=True)
        for file in sorted(place.iterdir())[: 3 if number == 0 else 12]:
            (tmp_path / "photos" / place.name / file.name).write_bytes(file.read_bytes())
    labels = ("[red]none", *read_bundle(path).manifest.labels)  # a bundle's labels style no terminal
    made = _written(tmp_path / "b.bundle", read_bundle(path), labels=labels)
    done = run("advise", "--bundle", made, "--data", tmp_path / "photos", "--devices", 2, "--hold-out", 0.4)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    first = sorted(photos.iterdir())[0].name
    assert "only 11 held-out photos" in said
    assert f"{first}: fewer than 4 photos" in said
    assert "[red]none" in said
    assert "no photo at all" in said


def _fleet_of_features(bundle: Bundle, held_classes: list[tuple[int, ...]]) -> tuple[list[LocalData], LocalData]:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, bundle.manifest.features))

    def drawn(classes: tuple[int, ...], each: int) -> LocalData:
        y = np.repeat(classes, each)
        return LocalData((centres[y] + 2 * rng.normal(size=(len(y), centres.shape[1]))).astype(np.float32), y)

    return [drawn(classes, 3) for classes in held_classes], drawn(tuple(range(CLASSES)), 5)


def test_alone_is_the_mean_of_the_first_five_and_bytes_are_the_largest_devices(bundle: Bundle) -> None:
    shares, asked = _fleet_of_features(bundle, [(0, 1, 2), (3,), (4, 5), (6, 7), (8, 9), tuple(range(10)), (0,)])
    rung = next(rung for rung in rungs(bundle.manifest) if rung.name == "ncm")
    (whole,) = FrozenFleet(bundle, shares, asked).outcomes(rung)
    each = [FrozenFleet(bundle, [share], asked).outcomes(rung)[0] for share in shares]
    np.testing.assert_array_equal(whole.alone, np.mean([one.right for one in each[:5]], axis=0))
    assert whole.uplink_bytes == max(one.uplink_bytes for one in each) == each[5].uplink_bytes


def test_what_is_said_of_the_chosen_way(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    known = {rung.name: rung for rung in rungs(bundle.manifest)}
    lost, other = np.r_[np.zeros(2), np.ones(98)], np.r_[np.ones(99), np.zeros(1)]
    for name, alone, words in (
        ("fedcof groups=8", np.zeros(100), "Export f.bundle again with --method fedcof --set groups=8, then:"),
        ("ffc discriminant", lost, "--bundle f.bundle --method ffc --form discriminant --broker"),
        ("ncm", np.zeros(100), "protofleet aggregate --bundle f.bundle --broker"),
    ):
        chosen = Measured(name, known[name], lost, alone, 5_000, doubt="its photos are few")
        best = Measured("ffc", known["ffc"], other, alone, 90_000, doubt="not this one's doubt")
        _show(Advice(Plan(), bundle, 400, 100, (chosen, best), ("a doubt",), {}), Path("f.bundle"), Console())
        said = " ".join(capsys.readouterr().out.split())
        assert words in said
        assert f"{name} *" in said
        assert "ffc *" not in said
        assert "That is 1.0 points behind ffc, no more than chance (1.7)" in said
        assert ("One device alone does as well" in said) == (alone is lost)
        assert "mind: a doubt" in said
        assert "mind: its photos are few" in said
        assert "not this one's doubt" not in said


def test_doubts_are_about_few_held_out_photos_and_classes_that_have_few_or_none(bundle: Bundle) -> None:
    def of(counts: list[int]) -> LocalData:
        y = np.repeat(np.arange(len(counts)), counts)
        return LocalData(np.zeros((len(y), 1, 1, 1), np.uint8), y)

    assert _doubts(bundle, of([4] * 10), of([5] * 10)) == ()
    first, few, untested, absent = _doubts(bundle, of([3, 4, 4, 4, 4, 3]), of([1, 0, 1, 1, 40, 6]))
    assert first.startswith("only 49 held-out photos")
    assert few.startswith("T-shirt/top, Sandal: fewer than 4 photos")
    assert untested.startswith("Trouser: no photo to spare for a test")
    assert absent.startswith("Shirt, Sneaker, Bag and 1 more: no photo at all")
    other = dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, method="fedhp"))
    assert list(_trained(other)) == ["fedhp"]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_bad_photos_are_one_clear_line(path: Path, photos: Path, tmp_path: Path) -> None:
    assert "nothing there" in _refused(path, tmp_path / "none")
    empty = tmp_path / "empty"
    (empty / "Bag").mkdir(parents=True)
    assert "is empty" in _refused(path, empty)
    alone = tmp_path / "alone"
    (alone / "Bag").mkdir(parents=True)
    for file in (photos / "Bag").iterdir():
        (alone / "Bag" / file.name).write_bytes(file.read_bytes())
    assert _refused(path, alone) == "error: photos, expected of two classes or more, got one only: Bag"
    (alone / "Bag").rename(alone / "Bagg")
    assert "unknown class" in _refused(path, alone)


def test_a_plan_that_does_not_fit_is_one_clear_line(path: Path, photos: Path) -> None:
    assert "--devices, expected photos enough that each gets one" in _refused(path, photos, "--devices", 900)
    assert "--classes-per-device, expected 4 to 10, got 3" in _refused(
        path, photos, "--devices", 3, "--classes-per-device", 3
    )
    assert "--hold-out" in _refused(path, photos, "--hold-out", 1)
    assert "--min-samples" in _refused(path, photos, "--min-samples", 0)
    assert "got fewer of each" in _refused(path, photos, "--min-samples", 100)
    assert "got no folder /nowhere" in _refused(path, "/not/looked/at/yet", "--json", "/nowhere/out.json")


@pytest.mark.parametrize(("value", "got"), [(1e30, "expected finite numbers"), (0.0, "all alike")])
def test_features_that_say_nothing_are_one_clear_line(
    value: float, got: str, path: Path, photos: Path, tmp_path: Path
) -> None:
    whole = read_bundle(path)
    weights = {name: np.full_like(each, value) for name, each in whole.params.items()}
    assert got in _refused(_written(tmp_path / "b.bundle", whole, weights), photos)


# ── equal to a fleet ────────────────────────────────────────────────────────────────────────────────────────────────


def _ways(bundle: Bundle) -> list[Rung]:
    """Every way of it, and FFC on projected features, which an export of width 128 does not suggest; but for those with
    noise, which is another for another bundle."""
    found = [rung for rung in rungs(bundle.manifest) if rung.method.mechanism(rung.hyper) is None]
    ffc = next(rung for rung in found if rung.name == "ffc")
    narrow = {"project": 32}
    found = [rung for rung in found if rung.hyper.get("groups", 1) in (1, 4)]
    return [*found, Rung("ffc project=32", ffc.method, {**ffc.hyper, **narrow}, narrow, None)]


def test_a_coordinator_and_devices_with_photos_give_the_same_answers_for_the_same_bytes(
    bundle: Bundle, tmp_path: Path
) -> None:
    """Images, not features, in the devices; the aggregator's own rounds, checks and store."""
    learn, held = load_held_out(FASHION / "train.parquet", bundle.manifest, share=0.25, most=160)
    dealt = [LocalData(learn.x[rows], learn.y[rows]) for rows in deal(learn.y, DEVICES)]
    secrets = [bytes([number]) * 32 for number in range(DEVICES)]
    made = [features_of(bundle, part) for part in dealt]
    asked = features_of(bundle, held)
    for number, rung in enumerate(_ways(bundle)):
        name, hyper = rung.method.name, dict(rung.hyper)
        exported = read_bundle(_written(tmp_path / f"{number}.bundle", bundle, method=name, hyper=hyper))
        with DurableStore(tmp_path / f"{number}.sqlite", exported.sha256, "fleet") as store:
            core = rounds_of(store, exported.manifest, exported.sha256, Settings(min_clients=DEVICES), now=0.0)
            devices = [
                Device(exported, part, f"device-{index + 1}", test=held, secret=secrets[index])
                for index, part in enumerate(dealt)
            ]
            for index in range(DEVICES):
                core.rounds.birth(f"device-{index + 1}", b"%d" % index, 0.0)
            core.advance(0.0, 0.0)
            sent = {}
            for index, device in enumerate(devices):
                result = device.run_round(core.announcement(), None)
                sent[f"device-{index + 1}"] = encode(result.contribution, core.announcement().encoding)
            decisions = core.take(list(sent.items()), 1.0)
            assert all(decision.accepted for decision in decisions), rung.name
            core.advance(1.0, 1.0)
            fleet = FrozenFleet(bundle, made, asked, run=store.run, secrets=secrets)
            (outcome,) = fleet.outcomes(rung)
            evaluation = devices[0].evaluate(core.state)
            accuracy = devices[0].accuracy(evaluation, name)
        assert outcome.right.mean() == pytest.approx(evaluation.all_classes[rung.method.way], abs=1e-12), rung.name
        assert outcome.uplink_bytes == max(map(len, sent.values())), rung.name
        assert outcome.told == core.told, rung.name
        assert 0 < accuracy.alone < 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fleet_of_processes_over_a_broker_has_the_accuracy_that_was_stated(tmp_path: Path) -> None:
    """On one bundle as `export` makes it, with what the recommendation says to tell the aggregator, and on one that is
    told another number of groups. FedCOF's groups are those that the devices' own secrets draw."""
    x, y = fleets.share(0, range(fleets.CLASSES), 150)
    apart_x, apart_y = fleets.share(1, range(fleets.CLASSES), 150)
    learn, held = LocalData(x, y), LocalData(apart_x, apart_y)
    np.savez(tmp_path / "held.npz", x=held.x, y=held.y)
    exported = fleets.bundle(tmp_path / "base.bundle", "ncm")
    base = read_bundle(exported)
    told = {way["way"]: way for way in advise(base, (learn, held), Plan(2)).as_json()["ways"]}
    shares = [LocalData(learn.x[rows], learn.y[rows]) for rows in deal(learn.y, 2)]
    for rung in (rung for rung in rungs(base.manifest) if rung.hyper.get("groups", 1) in (1, 4)):
        folder = tmp_path / rung.name
        folder.mkdir()
        path, options = exported, ["--method", rung.method.name]
        if rung.beside:
            fields = {"method": rung.method.name, "hyper": dict(rung.hyper)}
            path, options = _written(folder / "f.bundle", base, **fields), []
        options += [word for name, value in rung.solved_with.items() for word in (f"--{name}", str(value))]
        with fleets.fleet_in(folder) as fleet:
            fleet.aggregator([path], "--min-clients", 2, "--no-calibrate", *options)
            for number, share in enumerate(shares):
                fleet.client(f"device-{number + 1}", path, (share.x, share.y), "--test", tmp_path / "held.npz")
            assert set(fleet.finish(200).values()) == {0}, fleet.log("aggregator")
            largest = max(map(len, fleet.payloads(1).values()))
            run_id = fleet.state(read_bundle(path).sha256).run
        histories = [folder / f"state-device-{n}" / "history.jsonl" for n in (1, 2)]
        right = {json.loads(file.read_text().splitlines()[-1])["right"]["all_classes"] for file in histories}
        secrets = [_secret(folder / f"state-device-{n}", path, n) for n in (1, 2)]
        made = [features_of(base, share) for share in shares]
        (outcome,) = FrozenFleet(base, made, features_of(base, held), run=run_id, secrets=secrets).outcomes(rung)
        assert len(right) == 1, "all devices answer by the same head"
        assert right.pop() == pytest.approx(outcome.right.mean(), abs=1e-12), rung.name
        assert largest == outcome.uplink_bytes == told[rung.name]["uplink_bytes"], rung.name
        if rung.hyper.get("groups", 1) == 1:  # nothing is drawn
            assert told[rung.name]["accuracy"] == pytest.approx(outcome.right.mean(), abs=1e-12), rung.name


def _secret(state: Path, bundle: Path, number: int) -> bytes:
    sha256 = read_bundle(bundle).sha256
    with Journal(state, fleet=fleets.FLEET, device=f"device-{number}", bundle=sha256) as journal:
        return journal.secret()


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["ncm", "fedcof", "ffc"]),
    classes=st.integers(1, 12),
    width=st.integers(1, 40),
    groups=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_what_is_told_is_what_an_encoded_contribution_takes(name, classes, width, groups, seed) -> None:
    found, rng = method(name), np.random.default_rng(seed)
    groups = groups if found.statistic.GROUPS > 1 else 1
    counts = rng.integers(256, 65_536, (classes, found.statistic.GROUPS))
    counts[:, groups:] = 0
    statistic = found.statistic.zero(classes, width)
    sums, _ = class_sums(rng.random((counts.size, width)), np.arange(counts.size), counts.size)
    rows = np.where(counts.reshape(-1, 1) > 0, sums, 0.0)
    statistic = dataclasses.replace(
        statistic, counts=counts.reshape(-1), **{found.statistic.row_fields()[0].name: rows}
    )
    sent = Contribution.of(statistic, run=bytes(4), round=1, method=name, bundle=bytes(32), extractor=bytes(range(32)))
    assert sent_bytes(found, classes, width, groups) == len(encode(sent, found.encoding))


def test_inspect_and_profile_tell_the_ladder(path: Path, tmp_path: Path) -> None:
    bundle = read_bundle(path)
    wanted = [(rung.name, rung.uplink_bytes) for rung in rungs(bundle.manifest)]
    inspected = json.loads(run("inspect", path, "--json", "-").stdout)["uplink_without_training"]
    out = tmp_path / "p.json"
    page = tmp_path / "p.html"
    shown = run("profile", path, "--devices", "raspberry-pi-4", "--json", out, "--html", page).stdout
    profiled = json.loads(out.read_text())["uplink"]["without_training"]
    assert inspected == profiled
    assert [(each["way"], each["bytes"]) for each in inspected] == wanted
    text = run("inspect", path).stdout
    assert ", none trained, " in text
    assert "training batch" not in text
    for name, size in wanted:
        assert f"{size:,}" in text
        assert name in text
        assert name in " ".join(shown.split())
        assert re.search(rf"<t[hd][^>]*>{name}</t[hd]>", page.read_text())
    assert "protofleet advise" in text
    assert "protofleet advise" in " ".join(shown.split())


def test_a_ladder_of_a_thousand_classes_costs_little_memory_and_says_the_same_to_a_thousandth(bundle: Bundle) -> None:
    labels = tuple(f"class {number}" for number in range(1_000))
    wide = msgspec.structs.replace(bundle.manifest, labels=labels, features=1_280)
    tracemalloc.start()
    found = {rung.name: rung.uplink_bytes for rung in rungs(wide)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 128 << 20
    assert found["fedcof groups=2"] == pytest.approx(sent_bytes(method("fedcof"), 1_000, 1_280, 2), rel=1e-3)


def test_a_bundle_that_has_a_setting_already_serves_that_way_as_it_is(bundle: Bundle) -> None:
    groups = msgspec.structs.replace(bundle.manifest, method="fedcof", hyper=method("fedcof").resolve({"groups": 3}))
    found = {rung.name: dict(rung.beside) for rung in rungs(groups)}
    assert found["fedcof groups=3"] == {}
    assert found["fedcof groups=8"] == {"groups": 8}
    wide = msgspec.structs.replace(bundle.manifest, features=1280)
    names = [rung.name for rung in rungs(wide)]
    assert names.index("fedcof groups=4") < names.index("ffc project=256") < names.index("fedcof groups=8")


def test_a_method_with_two_forms_has_a_rung_for_each(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a head that can be made of the same sums is measured as soon as the method's file names it."""

    class TwoForms(FFC):
        hyper: ClassVar = {**FFC.hyper, "form": Hyper("ridge", "a test", ("ridge", "other"))}
        solved_with: ClassVar = ("form",)

    monkeypatch.setattr("protofleet.contract.bundle.uplink_bytes.METHODS", {"ffc": TwoForms()})
    first, second = rungs(bundle.manifest)
    assert (first.name, second.name) == ("ffc", "ffc other")
    assert (first.beside, second.beside, second.solved_with) == ({}, {}, {"form": "other"})
    assert first.uplink_bytes == second.uplink_bytes


# ── the choice ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _measured(name: str, right: list[int], size: int) -> Measured:
    return Measured(name, None, np.array(right, np.float64), uplink_bytes=size)


def test_the_cheapest_within_one_standard_error_of_the_best_is_taken() -> None:
    n = 100
    cheap = _measured("cheap", [1] * 70 + [0] * 30, 1)
    best = _measured("best", [1] * 80 + [0] * 20, 9)
    assert recommended((cheap, best)).name == "best"  # ten photos that only one gets right are no chance
    other = np.r_[np.zeros(10), np.ones(71), np.zeros(19)].astype(int).tolist()
    crossed = _measured("crossed", other, 2)  # 71 right, but others: 19 gained and 10 lost
    behind, error = cheap.behind(crossed.right)
    difference = crossed.right - cheap.right
    assert behind == pytest.approx(0.01)
    assert error == pytest.approx(np.sqrt(((difference - 0.01) ** 2).sum() / (n - 1) / n))
    assert recommended((cheap, crossed)).name == "cheap"
    equal = _measured("dear", [1] * 70 + [0] * 30, 5)
    assert recommended((cheap, equal)).name == "cheap"


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=12, max_size=80),
    devices=st.integers(1, 4),
    each=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_dealing_gives_every_photo_to_one_device_and_every_class_in_equal_parts(labels, devices, each, seed) -> None:
    y = np.array(labels)
    known = np.unique(y)
    try:
        dealt = deal(y, devices, classes_each=min(each, len(known)), seed=seed)
    except UsageError:
        return
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(y)))
    for label in known:
        parts = [int((y[rows] == label).sum()) for rows in dealt]
        holders = [part for part, rows in zip(parts, dealt, strict=True) if part]
        assert max(holders) - min(holders) <= 1
    assert all(len(np.unique(y[rows])) <= each for rows in dealt)


def test_the_larger_parts_are_not_always_the_same_devices() -> None:
    assert [len(rows) for rows in deal(np.repeat(np.arange(6), 4), 3)] == [8, 8, 8]


def test_of_many_photos_the_same_share_of_every_class_is_looked_at(bundle: Bundle, said: list[str]) -> None:
    learn, held = load_held_out(FASHION / "train.parquet", bundle.manifest, share=0.2, most=500)
    assert len(learn) + len(held) == 500
    assert set(learn.counts(CLASSES)) == {40}
    assert set(held.counts(CLASSES)) == {10}
    whole = load_held_out(FASHION / "train.parquet", bundle.manifest, share=0.2)[1]
    assert {image.tobytes() for image in held.x} <= {image.tobytes() for image in whole.x}
    assert said[0] == "500 of 6,000 photos are looked at"


def test_photos_of_one_class_or_none_held_out_are_refused_in_the_library(bundle: Bundle) -> None:
    x = np.zeros((8, 28, 28, 1), np.uint8)
    some, none = LocalData(x, np.arange(8) % 2), LocalData(x[:0], np.zeros(0, np.int64))
    with pytest.raises(DataError, match="none held out"):
        advise(bundle, (some, none))
    with pytest.raises(DataError, match="two classes"):
        advise(bundle, (LocalData(x, np.zeros(8, np.int64)), some))
    with pytest.raises(DataError, match="two classes"):  # those without a label are no class
        advise(bundle, (LocalData(x, np.arange(8) % 2 - 1), some))
