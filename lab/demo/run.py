"""`protofleet demo`: a fleet of processes answers what none of its devices could, on real images, over a real broker.

1. Take a shipped bundle and its images. Where the extra `photos` is installed these are colour photos of hands
   (`lab/demo/photos.py`), else a part of Fashion-MNIST (`lab/demo/shipped.py`); neither needs torch. If the options
   need another bundle, go *from scratch*: load the data, pretrain the backbone on the public images, export it
   (`lab/demo/from_scratch.py`). Several backbones are assigned to the devices in turn.
2. Deal the devices' images: a few classes each (`lab/demo/story.py`). A device gets photos as a folder of files.
3. Start a broker, an aggregator and one client per device, each a process of its own. Follow them by the aggregator's
   `--json` and each device's `history.jsonl` alone.
4. When they are done, fetch FFC's head from the broker as a device would, and end the processes. With several backbones
   there is no FFC round and no head, since sums of features only add up over one extractor.
5. Compute the baselines: the public images alone, each device alone, and the pooled ridge solution that FFC must equal.
6. Write `summary.json` and `report.html`.

Whatever goes wrong, and at Ctrl-C, no process is left behind (`lab/demo/processes.py`).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from protofleet.contract.bundle.shipped_extractor import has_photos, photos_bundle
from protofleet.contract.console.logs import told
from protofleet.contract.errors import LinkError, UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.methods import DEFAULT, method
from protofleet.edge_client.data import LocalData
from protofleet.export.backbones.backbone_names import check_backbone_name
from protofleet.hw_profiles.reports.page import check_pages
from protofleet.lab.demo.baselines import Evidence, baselines, read_history, received_head
from protofleet.lab.demo.photos import PHOTO_DATA, draw, photo_bundle, read_photos
from protofleet.lab.demo.prerequisites import check_there, fresh_directory
from protofleet.lab.demo.processes import Fleet, check_port, free_port, wait_for_port
from protofleet.lab.demo.report import render_report
from protofleet.lab.demo.shipped import BACKBONE, BUNDLE, DATA, METHOD, read_images, shipped_bundle
from protofleet.lab.demo.story import Images, Prepared, dealt_rows
from protofleet.lab.demo.summary import summarise_run
from protofleet.lab.reporting.progress import Part, Stage, stage
from protofleet.lab.workers.workers import limited_threads

__all__ = ["Demo", "run_demo"]

FLEET = "demo"
_MAX_CLIENTS = 200
_POLL_S = 0.1
_STALL_S = 300.0


@dataclass(frozen=True)
class Demo:
    """The demo's options; see `protofleet demo --help`.

    Attributes:
        rounds: None for the method's default.
        data: None for the shipped photos where their extractor is installed, and for Fashion-MNIST elsewhere.
        port: port of the broker; 0 for any free one.
        backbone: one name, or several, comma-separated, assigned to the devices in turn; None for what is shipped.
        verbose: print each command that is started, and start it with `-v`.
        input_shape: (H, W, c) to resize images to; None for their own shape.
        scratch: pretrain and export a bundle even where the shipped one would do.
    """

    clients: int = 5
    rounds: int | None = None
    method: str = METHOD
    data: str | None = None
    out: Path = Path("protofleet-demo")
    seed: int = 0
    port: int = 0
    backbone: str | None = None
    verbose: bool = False
    input_shape: tuple[int, int, int] | None = None
    scratch: bool = False

    @property
    def on_photos(self) -> bool:
        """Whether the demo shows photos over the extractor that ships for them, which cannot be trained."""
        asked = self.data == PHOTO_DATA or (self.data is None and has_photos())
        fits = (self.scratch, self.backbone, self.input_shape) == (False, None, None)
        return asked and fits and not method(self.method).trains

    @property
    def dataset(self) -> str:
        """The name of the data set, or its path."""
        return self.data or (PHOTO_DATA if self.on_photos else DATA)

    @property
    def from_scratch(self) -> bool:
        """Whether the demo needs a bundle of its own."""
        asked = (self.method, self.dataset, self.backbone or BACKBONE, self.input_shape)
        return not self.on_photos and (self.scratch or asked != (METHOD, DATA, BACKBONE, None))

    @property
    def backbones(self) -> list[str]:
        """The backbone of each device."""
        names = [name.strip() for name in (self.backbone or BACKBONE).split(",")]
        return [names[number % len(names)] for number in range(self.clients)]

    @property
    def calibrates(self) -> bool:
        """Whether the demo ends with an FFC round."""
        return len(set(self.backbones)) == 1

    @property
    def closes(self) -> bool:
        """Whether there is an FFC round at all, at the end or as the method itself."""
        row = method(self.method)
        return self.calibrates and (row.trains or row.closes_runs)

    @property
    def own_rounds(self) -> int:
        """Number of rounds of the method."""
        return method(self.method).rounds if self.rounds is None else self.rounds

    @property
    def rounds_in_all(self) -> int:
        """Number of rounds of the method and of FFC."""
        return self.own_rounds + (self.calibrates and method(self.method).trains)


def run_demo(demo: Demo, console: Console) -> dict[str, Any]:
    """Run the demo, write `summary.json` and `report.html` into `demo.out`, and return the summary.

    Raises:
        UsageError, DataError: an option or the data cannot be used.
        LinkError: a process ended early. The line names its log.
    """
    began, rounds = time.monotonic(), _check(demo)
    out = fresh_directory(demo.out)
    with stage(console) as shown:
        if demo.data is None and not demo.from_scratch and not demo.on_photos:
            shown.tell(f"The same on colour photos: {install_command('photos')}")
        prepare = _from_scratch if demo.from_scratch else _photos if demo.on_photos else _as_shipped
        images, prepared = prepare(demo, out, shown)
        rows = dealt_rows(images, demo.clients, demo.seed)
        shares = [LocalData(images.dealt.x[part], images.dealt.y[part]) for part in rows]
        names = [f"device-{number}" for number in range(1, demo.clients + 1)]
        _write_shares(out, names, shares, rows, images)
        evidence = _run_fleet(demo, rounds, prepared, names, out, shown)
        bundles, states = [p.bundle for p in prepared], [_state(out, name) for name in names]
        for state in states:
            shutil.rmtree(state / "images", ignore_errors=True)  # decoded, which a device keeps for its next start
        text = "what each knows alone, and pooled"
        with shown.part("baselines", text, rounds + 1) as part, limited_threads(1):  # of BLAS: its matrices are small
            beside = baselines(bundles, names, shares, images, evidence, rounds, states, on_round=part.at)
    summary = summarise_run(
        method=method(demo.method).name,
        seed=demo.seed,
        images=images,
        prepared=prepared,
        names=names,
        shares=shares,
        rows=rows,
        rounds=rounds,
        evidence=evidence,
        beside=beside,
    )
    summary |= {"seconds": time.monotonic() - began, "seconds_by_phase": shown.seconds}
    (out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (out / "report.html").write_text(render_report(summary), encoding="utf-8")
    return summary


def _check(demo: Demo) -> int:
    """Check every option before anything starts; returns the number of rounds."""
    rounds = demo.own_rounds
    for name in dict.fromkeys(demo.backbones):
        check_backbone_name(name)
    _check_packages(demo)
    for name, value, low, high in (
        ("--clients", demo.clients, 1, _MAX_CLIENTS),
        ("--rounds", rounds, 1, 10_000),
        ("--seed", demo.seed, 0, 2**31 - 1),
        ("--port", demo.port, 0, 65_535),
    ):
        if not low <= value <= high:
            raise UsageError(name, expected=f"{low} to {high}", got=value)
    row = method(demo.method)
    if not demo.calibrates and not row.shares:
        raise UsageError(
            "--backbone",
            expected=f"one for all devices: what {row.name} sends only adds up over one extractor",
            got=demo.backbone,
            hint=f"--method {DEFAULT}",
        )
    if demo.port:
        check_port(demo.port)
    return rounds


def _check_packages(demo: Demo) -> None:
    """Check for the packages beyond the base install, before anything starts."""
    check_pages("demo")
    check_there("iotcore", "the demo's broker", "demo")
    if demo.on_photos:
        photos_bundle()
    for package in ("torch", "torchvision", "onnx", "onnxscript") if demo.from_scratch else ():
        check_there(package, "a bundle from scratch, which these options ask for", "all")


def _as_shipped(demo: Demo, out: Path, shown: Stage) -> tuple[Images, list[Prepared]]:
    """The shipped images, and the shipped bundle for every device."""
    with shown.part("loading", "the shipped bundle and images") as part:
        target = out / BUNDLE.name
        shutil.copyfile(BUNDLE, target)
        prepared = Prepared(shipped_bundle(), target)
        part.say(f"{target.stat().st_size / 1e6:.1f} MB, {prepared.bundle.sha256.hex()[:12]}")
        return read_images(), [prepared] * demo.clients


def _photos(demo: Demo, out: Path, shown: Stage) -> tuple[Images, list[Prepared]]:
    """The shipped photos, and a bundle of the extractor for them for every device."""
    with shown.part("loading", "the extractor for photos, and photos of hands") as part:
        photos = read_photos()
        prepared = photo_bundle(photos.labels, demo.method, out / BUNDLE.name)
        part.say(f"{prepared.path.stat().st_size / 1e6:.1f} MB, {prepared.bundle.sha256.hex()[:12]}")
        return draw(photos, prepared.bundle.manifest.input_shape, demo.seed), [prepared] * demo.clients


def _from_scratch(demo: Demo, out: Path, shown: Stage) -> tuple[Images, list[Prepared]]:
    """Images of any data set, and a bundle for each backbone. Only this function loads torch."""
    from protofleet.lab.data.datasets import load_dataset
    from protofleet.lab.demo.from_scratch import divided, prepare

    with shown.part("loading", "loading " + demo.dataset) as part, told(part.tell):
        source = demo.dataset
        if source == PHOTO_DATA:
            read_photos().write(out / "devices" / source)  # as a folder, which is what the lab reads
            source = str(out / "devices" / source)
        images = divided(load_dataset(source, demo.input_shape), seed=demo.seed)
    return images, prepare(demo.backbones, images, demo.method, out, seed=demo.seed, shown=shown)


def _write_shares(
    out: Path, names: Sequence[str], shares: Sequence[LocalData], rows: Sequence[NDArray[np.int64]], images: Images
) -> None:
    """Each device's images and the test images: photos as files in class folders, others as arrays."""
    for name, share, part in zip(names, shares, rows, strict=True):
        directory = out / "devices" / name
        directory.mkdir(parents=True)
        if images.files is None:
            np.savez(directory / "train.npz", x=share.x, y=share.y)
        else:
            images.files[0].take(part).write(directory / "photos")
    if images.files is None:
        np.savez(out / "devices" / "test.npz", x=images.test.x, y=images.test.y)
    else:
        images.files[1].write(out / "devices" / "test")


def _run_fleet(
    demo: Demo, rounds: int, prepared: Sequence[Prepared], names: list[str], out: Path, shown: Stage
) -> Evidence:
    """Steps 2 and 3: start the processes, follow them to their end, and end them."""
    broker = f"mqtt://127.0.0.1:{demo.port or free_port()}"
    port = int(broker.rpartition(":")[2])
    ending = "" if demo.rounds_in_all == rounds else " and FFC"
    text = (
        f"{len(names)} devices, {rounds} {'round' if rounds == 1 else 'rounds'} of {method(demo.method).title}{ending}"
    )
    with shown.part("fleet", text, demo.rounds_in_all * len(names)) as part, _fleet(demo, out, part) as fleet:
        part.say("broker")
        fleet.start("broker", ["broker", "--listen", f"127.0.0.1:{port}"])
        wait_for_port(fleet, "broker", port)
        common = ["--broker", broker, "--fleet", FLEET]
        named = ["--method", demo.method] if ":" in demo.method else []  # a class that is not installed
        fleet.start("aggregator", ["aggregate", *common, *named, *_aggregate_options(demo, rounds, prepared, out)])
        for name, theirs in zip(names, prepared, strict=True):
            own = ["--bundle", str(theirs.path), *_client_options(out, name, demo.on_photos)]
            fleet.start(name, ["client", "--until-finished", *common, *named, *own])
        _follow(fleet, names, out, part)
        head = received_head(broker, FLEET, prepared[0].bundle.manifest) if demo.closes else None
    return Evidence(
        aggregate=json.loads((out / "aggregate.json").read_text(encoding="utf-8")),
        clients=[json.loads((out / "devices" / n / "client.json").read_text(encoding="utf-8")) for n in names],
        histories=[read_history(_history(out, name)) for name in names],
        head=head,
    )


def _fleet(demo: Demo, out: Path, part: Part) -> Fleet:
    return Fleet(out / "logs", on_start=part.tell, extra=("-v",)) if demo.verbose else Fleet(out / "logs")


def _aggregate_options(demo: Demo, rounds: int, prepared: Sequence[Prepared], out: Path) -> list[str]:
    bundles = [text for path in dict.fromkeys(str(p.path) for p in prepared) for text in ("--bundle", path)]
    files = ["--store", str(out / "aggregate.sqlite"), "--json", str(out / "aggregate.json")]
    course = ["--rounds", str(rounds), "--min-clients", str(demo.clients)]
    course += ["--max-share", "1"]  # the demo knows its devices, and compares with the data pooled as it is
    course += ["--sums-encoding", "f64"]  # to the last digits: factors are of samples that differ by their rounding
    return [*bundles, *files, *course, "--calibrate" if demo.calibrates else "--no-calibrate"]


def _client_options(out: Path, name: str, is_folder: bool) -> list[str]:
    home = out / "devices" / name
    train, test = ("photos", "test") if is_folder else ("train.npz", "test.npz")
    data = ["--data", str(home / train), "--test", str(out / "devices" / test)]
    return [*data, "--id", name, "--state", str(_state(out, name)), "--json", str(home / "client.json")]


def _follow(fleet: Fleet, names: Sequence[str], out: Path, part: Part) -> None:
    """Return when every device and the aggregator have ended successfully."""
    last_done, moved_at = -1, time.monotonic()
    while not all(fleet.ended(name) for name in (*names, "aggregator")):
        fleet.check(lasting=("broker",))
        done = sum(_lines(_history(out, name)) for name in names)
        if done != last_done:
            last_done, moved_at = done, time.monotonic()
            part.at(done, f"{done} contributions settled")
        if time.monotonic() - moved_at > _STALL_S:
            raise LinkError(
                "the fleet", expected=f"a round within {_STALL_S:.0f} s", got="none", hint=f"the logs in {out / 'logs'}"
            )
        time.sleep(_POLL_S)


def _state(out: Path, name: str) -> Path:
    return out / "devices" / name / "state"


def _history(out: Path, name: str) -> Path:
    return _state(out, name) / "history.jsonl"


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
