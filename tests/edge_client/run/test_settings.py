"""The client's command line and settings file: every mistake is one line and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import run, run_process

from protofleet.contract.errors import ProtofleetError, UsageError
from protofleet.contract.identity.signing_keys import read_public_key
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.settings import ClientSettings

NEEDED = {"bundle": "f.bundle", "broker": "mqtt://h", "id": "pi-1", "data": "d", "state": "s"}
TOML = "\n".join(f'{name} = "{value}"' for name, value in NEEDED.items())


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "client.toml"
    path.write_text(text)
    return str(path)


def test_file_and_options_come_together(tmp_path: Path) -> None:
    file = toml(tmp_path, TOML + '\nthreads = 2\nfleet = "north"\npatience = 5')
    settled = read_settings(ClientSettings, {"threads": 3, "data": None, "quiet": True}, file=file)
    expected = ClientSettings(**NEEDED, threads=3, fleet="north", patience=5.0, quiet=True)  # type: ignore[arg-type]
    assert settled == expected
    assert read_settings(ClientSettings, NEEDED) == ClientSettings(**NEEDED)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TOML + '\nbundel = "x"', r"unknown key, expected an option's name, got bundel, try one of bundle"),
        (TOML + '\nthreads = "two"', r"--threads in .*client.toml, expected a whole number, got the text two"),
        (TOML + "\nthreads = 0", r"--threads in .*client.toml, expected 1 to 256, got 0"),
        (TOML + "\npatience = nan", r"--patience in .*client.toml, expected 0.1 to 1e\+06, got nan"),
        (TOML.replace("pi-1", "pi/1"), r"--id in .*client.toml, expected 1 to 64 of a-z"),
        (TOML + '\nfleet = "a+b"', r"--fleet in .*client.toml, expected"),
        ('bundle = "x"', r"expected --id and --state and --broker, got none"),
        ("bundle = ", r"expected TOML, got"),
    ],
)
def test_bad_settings(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        read_settings(ClientSettings, {}, file=toml(tmp_path, text))
    with pytest.raises(UsageError, match="expected a TOML file, got No such file"):
        read_settings(ClientSettings, {}, file=str(tmp_path / "absent.toml"))


def test_public_keys_in_every_usual_form(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

    key = ed25519.Ed25519PrivateKey.generate().public_key()
    raw = key.public_bytes_raw()
    spki = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    path = tmp_path / "key"
    for form in (raw, raw.hex().encode() + b"\n", key.public_bytes(*spki)):
        path.write_bytes(form)
        assert read_public_key(str(path)) == raw
    other = x25519.X25519PrivateKey.generate().public_key().public_bytes(*spki)
    for wrong in (b"", raw + b"x", b"zz" * 32, other, b"-----BEGIN PUBLIC KEY-----\nxx"):
        path.write_bytes(wrong)
        with pytest.raises(UsageError, match="--trust"):
            read_public_key(str(path))
    with pytest.raises(UsageError, match="No such file"):
        read_public_key(str(tmp_path / "absent"))


@pytest.fixture
def given(mnist_like_bundle: Callable[..., Path], tmp_path: Path) -> dict[str, str]:
    data = np.zeros((4, 28, 28, 1), np.uint8)
    np.savez(tmp_path / "train.npz", x=data, y=np.arange(4))
    np.savez(tmp_path / "one.npz", x=data, y=np.zeros(4, int))
    torn = tmp_path / "torn.bundle"
    torn.write_bytes(mnist_like_bundle().read_bytes()[:-100])
    return {
        "bundle": str(mnist_like_bundle()),
        "broker": "mqtt://127.0.0.1:1",
        "id": "pi-1",
        "data": str(tmp_path / "train.npz"),
        "state": str(tmp_path / "state"),
        "patience": "0.5",
    }


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        ({"bundle": "{tmp}/torn.bundle"}, 2, "is not a whole bundle, expected a zip archive"),
        ({"bundle": "{tmp}/absent"}, 2, "cannot read bundle"),
        ({"data": "{tmp}/absent"}, 2, "no data at"),
        (
            {"broker": "http://h"},
            2,
            "mqtts://host[:port], in user and password / ? # as %XX, got 8 characters that begin with http://",
        ),
        (
            {"broker": "mqtts://127.0.0.1:1", "ca": "{tmp}/absent.pem"},
            2,
            "absent.pem, expected a PEM file, got No such file or directory",
        ),
        ({"id": "Pi 1"}, 2, "--id, expected"),
        ({"threads": "x"}, 2, "--threads"),
        ({"trust": "{tmp}/train.npz"}, 2, "--trust"),
        ({"json": "{tmp}/absent/s.json", "patience": "0.2"}, 2, "--json"),
        ({}, 1, "no broker at mqtt://127.0.0.1:1 within 0.5 s"),
    ],
)
def test_mistakes_are_one_line(
    given: dict[str, str], tmp_path: Path, change: dict[str, str], code: int, line: str
) -> None:
    options = {**given, **{name: value.format(tmp=tmp_path) for name, value in change.items()}}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    call = run if change else run_process  # in a process where one comes up, and ends badly
    done = call("client", "--quiet", *words)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ")
    assert line in said


def test_called_from_another_program_it_does_not_replace_it(given: dict[str, str]) -> None:
    from protofleet.edge_client.run.process import run

    with pytest.raises(ProtofleetError, match="no broker"):
        run(read_settings(ClientSettings, {**given, "patience": 0.2, "quiet": True}))


def test_the_device_process_carries_nothing_of_the_command_line(given: dict[str, str], tmp_path: Path) -> None:
    """What runs for months has neither typer nor rich nor pydantic in it, and no password in its arguments."""
    from brokers import Embedded

    broker = Embedded()
    broker.start()
    options = {**given, "broker": broker.url.replace("mqtt://", "mqtt://me:secret@"), "patience": "20"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen(
        [sys.executable, "-m", "protofleet", "client", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "connected to" in line:
                break
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
    finally:
        process.kill()
        process.communicate()
        broker.stop()
    assert "secret" not in " ".join(arguments)
    assert "pi-1" in arguments
    assert "onnxruntime" in mapped
    assert "pydantic_core" not in mapped
