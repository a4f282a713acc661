"""`protofleet doctor`: whether this machine can run Protofleet, and what to do where it cannot.

Each check is one line: what was checked, what was found, and what helps. Without options the command checks the system,
the packages and the methods. With options it also checks these, as a device would use them:

    bundle             read, its hashes checked, both graphs run once
    broker             connected to; a published message must come back
    state directory    written to

Nothing is left behind. A `note` is something that only some commands need. A `fault` stops a device or an aggregator,
and makes the exit code 1.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import MethodError, ProtofleetError, UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.methods import LOAD_HELP, METHODS, load_method
from protofleet.contract.printable import counted

if TYPE_CHECKING:
    from protofleet.contract.mqtt.address import Address
    from protofleet.contract.mqtt.certificates import Expiry

__all__ = ["Finding", "doctor_command", "examine"]

SCHEMA = "protofleet.doctor/1"
_MARKS = {"good": "ok", "note": "note", "fault": "FAULT"}
_FREE_BYTES = 64 << 20  # journal, outbox and a Gram of D = 1,280 fit in it several times
_ECHO_S = 10.0


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        state: `good`; `note` where something is missing that only some commands need; `fault` where something fails.
        found: what the check found, in words.
        advice: what helps; empty where nothing is needed.
    """

    check: str
    state: Literal["good", "note", "fault"]
    found: str
    advice: str = ""


# arguments: each is an option, as typer reads them
def doctor_command(
    bundle: Annotated[Path | None, typer.Option(help="Read this bundle, and run its graphs once.")] = None,
    broker: Annotated[str | None, typer.Option(help="Connect to mqtt:// or mqtts://host[:port].")] = None,
    fleet: Annotated[str, typer.Option(help="The fleet whose topics the broker is asked about.")] = "fleet",
    id: Annotated[str, typer.Option(help="The device that asks it.")] = "doctor",
    state: Annotated[Path | None, typer.Option(help="Whether a state directory can be here.")] = None,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signed the broker.")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of the device's certificate.")] = None,
    key: Annotated[str | None, typer.Option(help="PEM file of its key.")] = None,
    crl: Annotated[str | None, typer.Option(help="PEM file of the broker's revocation list.")] = None,
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the findings"))] = None,
) -> int:
    """Look whether this machine, a bundle, a broker and a state directory are as a device needs them."""
    if method is not None:
        load_method(method)
    findings = list(examine(bundle, broker, fleet, id, state, (ca, cert, key, crl)))
    write_json(json, {"schema": SCHEMA, "findings": [asdict(finding) for finding in findings]})
    rows = [(f.check, _MARKS[f.state], f.found, f.advice) for f in findings]
    show_table(beside(json), ("check", "", "found", "what helps"), rows, words=range(4))
    return int(any(finding.state == "fault" for finding in findings))


def examine(
    bundle: Path | None = None,
    broker: str | None = None,
    fleet: str = "fleet",
    device: str = "doctor",
    state: Path | None = None,
    tls: tuple[str | None, ...] = (None, None, None, None),
) -> Iterator[Finding]:
    """Run every check that was asked for, in the order in which a device would meet them.

    Args:
        tls: PEM files of authority, certificate, key and revocation list.
    """
    yield from _system()
    yield from _packages()
    yield from _kernels()
    yield from _methods()
    if bundle is not None:
        yield _tried("bundle", lambda: _bundle(bundle))
    if state is not None:
        yield _tried("state directory", lambda: _state(state))
    if broker is not None:
        shown: list[Expiry] = []
        yield _tried("broker", lambda: _broker(broker, fleet, device, tls, shown))
        yield from _certificates(broker, tls, shown)


def _tried(check: str, look: Callable[[], Finding]) -> Finding:
    """The finding of a check, or a fault with its error."""
    try:
        return look()
    except ProtofleetError as error:
        return Finding(check, "fault", str(error))


# ── the machine ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _system() -> Iterator[Finding]:
    machine = f"{platform.system()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    wide = sys.maxsize > 2**32
    advice = "" if wide else "a 64-bit system: ONNX Runtime has no wheels for others"
    yield Finding("system", "good" if wide else "fault", machine, advice)
    yield Finding("Python", "good", f"{platform.python_version()}, {sys.prefix}")
    total, free = (_memory(name) for name in ("MemTotal", "MemAvailable"))
    if total and free:
        enough = free > 150 << 20
        advice = "" if enough else "a device takes 120 MB; a smaller batch or bundle, or fewer other programs"
        yield Finding("memory", "good" if enough else "note", f"{free >> 20:,} MB free of {total >> 20:,} MB", advice)


def _memory(name: str) -> int:
    """An entry of /proc/meminfo in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def _packages() -> Iterator[Finding]:
    """Whether the base install is complete, and which extras are."""
    try:
        wanted, extras = requires("protofleet") or [], metadata("protofleet").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        yield Finding("packages", "note", "protofleet is not installed", install_command(""))
        return
    base = _missing([line for line in wanted if "extra ==" not in line])
    runtime = "" if base else f", ONNX Runtime {version('onnxruntime')}, numpy {version('numpy')}"
    advice = f"pip install {' '.join(base)}" if base else ""
    release = f"protofleet {version('protofleet')}{runtime}"
    yield Finding("packages", "fault" if base else "good", release, advice)
    for extra in sorted({*extras} - {"all", "dev"}):
        lacks = _missing(_of_extra(extra, wanted))
        advice = install_command(extra) if lacks else ""
        yield Finding(f"extra {extra}", "note" if lacks else "good", f"no {', '.join(lacks)}" if lacks else "", advice)


def _kernels() -> Iterator[Finding]:
    """The wheel with native code, if it is here: its version, its loops, and the hash of its library."""
    from protofleet.contract.bundle.native_kernels import installed_kernels

    kernels = installed_kernels()
    if kernels is not None:
        yield Finding("kernels", "good", str(kernels))
    elif find_spec("protofleet_kernels") is not None:
        found = "protofleet-kernels is here and cannot be used: devices train with the portable step"
        yield Finding("kernels", "note", found, "pip install --force-reinstall --no-deps protofleet-kernels")


def _of_extra(extra: str, wanted: list[str]) -> list[str]:
    """The requirements of an extra and of the extras that it names: `demo` is `protofleet[broker,report]`."""
    marked = [line for line in wanted if f'extra == "{extra}"' in line.replace("'", '"')]
    own = [line for line in marked if not line.startswith("protofleet[")]
    named = {
        name.strip() for line in marked if line not in own for name in line.partition("[")[2].split("]")[0].split(",")
    }
    return own + [line for name in sorted(named - {extra}) for line in _of_extra(name, wanted)]


def _missing(lines: list[str]) -> list[str]:
    """The distributions of these requirements that are not installed."""
    names, lacks = [line.split(";")[0].split("[")[0].strip(" ()") for line in lines], []
    for name in names:
        plain = name.split(">")[0].split("<")[0].split("=")[0].split("!")[0].split("~")[0].strip()
        try:
            version(plain)
        except PackageNotFoundError:
            lacks.append(plain)
    return lacks


def _methods() -> Iterator[Finding]:
    yield Finding("methods", "good", ", ".join(METHODS))
    for name in METHODS.installed():
        try:
            METHODS[name]
        except MethodError as error:
            yield Finding(f"method {name}", "note", str(error), "another release of the package that brings it")


# ── what a device is given ──────────────────────────────────────────────────────────────────────────────────────────


def _bundle(path: Path) -> Finding:
    """Read the bundle. Run an inference and, where it trains, a training step, on a grey image."""
    import numpy as np

    from protofleet.contract.bundle.bundle_file import read_bundle
    from protofleet.contract.wire.global_state import GlobalState
    from protofleet.edge_client.data import LocalData
    from protofleet.edge_client.training.compiled_graphs import CompiledGraphs

    bundle = read_bundle(path)
    m = bundle.manifest
    x = np.full((m.batch, *m.input_shape), 128, np.uint8)
    bench = CompiledGraphs(bundle)
    extractor, began = bench.shared_extractor(), time.perf_counter()
    features = extractor.features(x[:1])
    took = [f"an inference {(time.perf_counter() - began) * 1e3:.0f} ms"]
    if not np.isfinite(features).all():
        return Finding("bundle", "fault", "features that are no numbers", "exporting it anew")
    if m.trainable:
        trainer, labels = bench.trainer(), np.arange(m.batch, dtype=np.int64) % m.classes
        counts = np.bincount(labels, minlength=m.classes)
        given = METHODS[m.method].inputs(counts, GlobalState(bytes(4), 0, 0), m.classes, m.features)
        trainer.load_state(bundle.params)
        began = time.perf_counter()
        trainer.fit(LocalData(x, labels), epochs=1, lr=float(m.hyper["lr"]), given=given, seed=0)
        took.append(f"a step of {m.batch} images {(time.perf_counter() - began) * 1e3:.0f} ms")
    classes = counted(m.classes, "class", "classes")
    summary = f"{m.backbone} for {m.method}, {classes}, {bundle.sha256.hex()[:12]}; {', '.join(took)}"
    return Finding("bundle", "good", summary)


def _state(path: Path) -> Finding:
    """Whether files can be made there, on a disk with space. An existing directory is not changed."""
    directory = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    if not directory.is_dir():
        raise UsageError(f"{path}", expected="a directory", got="a file", hint="another --state")
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"protofleet")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        got = error.strerror or str(error)
        raise UsageError(
            f"{directory}", expected="a directory that can be written", got=got, hint=f"ls -ld {directory}"
        ) from None
    free = shutil.disk_usage(directory).free
    advice = "" if free > _FREE_BYTES else "a larger disk, or another --state"
    return Finding("state directory", "fault" if advice else "good", f"{directory}, {free >> 20:,} MB free", advice)


def _certificates(url: str, tls: tuple[str | None, ...], shown: Iterable[Expiry]) -> Iterator[Finding]:
    """The validity of the certificates that the connection needs. Unusable files are a fault of the broker's check.

    Args:
        shown: the broker's certificate, if it has shown one.
    """
    from protofleet.contract.mqtt.certificates import expiries

    try:
        address = _address(url, tls)
    except UsageError:
        return
    now = time.time()
    for expiry in (*expiries(address), *shown):
        state: Literal["good", "note", "fault"] = "note" if expiry.is_soon(now) else "good"
        state = "fault" if expiry.until <= now else state
        validity = f"{expiry.name} {expiry.words(now)}"
        yield Finding(expiry.what, state, validity, "" if state == "good" else expiry.help)


def _address(url: str, tls: tuple[str | None, ...]) -> Address:
    from protofleet.contract.mqtt.address import Address

    ca, cert, key, crl = tls
    return Address.parse(url, ca_file=ca, cert_file=cert, key_file=key, crl_file=crl)


def _broker(url: str, fleet: str, device: str, tls: tuple[str | None, ...], shown: list[Expiry]) -> Finding:
    """Connect as a device does, and check that a message on the device's status topic comes back.

    Args:
        shown: receives the broker's certificate.
    """
    from protofleet.contract.mqtt.link import Link, Received, client_id
    from protofleet.contract.wire import topics
    from protofleet.contract.wire.codec import encode
    from protofleet.contract.wire.messages import Status

    address = _address(url, tls)
    topic = topics.status(topics.check_id(fleet, "--fleet"), topics.check_device(device, "--id"))
    death = encode(Status(False, secrets.token_bytes(8), 0))
    began = time.monotonic()
    link = Link(address, client_id(fleet, device), subscriptions=[topic]).open()
    try:
        link.wait_connected(_ECHO_S)
        connected_ms = (time.monotonic() - began) * 1e3
        link.publish(topic, death)
        while time.monotonic() - began < 2 * _ECHO_S:
            event = link.receive(0.5)
            if isinstance(event, Received):
                link.acknowledge(event)
                if event.payload == death:
                    seconds = time.monotonic() - began
                    summary = f"{address}: connected in {connected_ms:.0f} ms, an echo after {seconds:.1f} s"
                    return Finding("broker", "good", summary)
    finally:
        shown += [] if link.broker_certificate is None else [link.broker_certificate]
        link.close()
    advice = f"the broker's access rules: may {device} read and write {topic}?"
    return Finding("broker", "fault", f"{address}: connected, but what was published did not come back", advice)
