"""Networks by a library's name: their own size and statistics, their weights fetched once, and a clear line without."""

from __future__ import annotations

import hashlib
import io
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import nn

from protofleet import cli
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import DownloadError, UsageError
from protofleet.contract.extras import install_command
from protofleet.export.backbones import libraries
from protofleet.export.backbones.backbone import IMAGENET_MEAN, IMAGENET_STD, find_backbone
from protofleet.export.backbones.vision import make_importable, models
from protofleet.export.backbones.weights import tensors_sha256
from protofleet.export.bundles.build import build_bundle

SMALL = "shufflenet_v2_x0_5"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing was fetched before."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "torch" / "hub" / "checkpoints"


Served = Callable[[Mapping[str, bytes]], str]


@pytest.fixture
def served() -> Iterator[Served]:
    """`served({path: bytes})`: the address of a server of these files, which answers as the Hugging Face hub does."""
    servers: list[ThreadingHTTPServer] = []

    def start(files: Mapping[str, bytes]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                payload = files.get(self.path)
                self.send_response(200 if payload is not None else 404)
                self.send_header("Content-Length", str(len(payload or b"")))
                if payload is not None:
                    self.send_header("ETag", f'"{hashlib.sha1(payload).hexdigest()}"')
                    self.send_header("X-Repo-Commit", "0" * 40)
                else:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(payload or b"")

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                return None

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def published() -> Iterator[Callable[[str], None]]:
    """`published(url)`: torchvision's own weights of the small network lie there now."""
    value = models().get_model_weights(SMALL).DEFAULT.value
    before = value.url
    yield lambda url: object.__setattr__(value, "url", url)
    object.__setattr__(value, "url", before)


def _weights_file(net: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    return file.getvalue()


def test_size_and_statistics_are_the_networks_own_unless_given():
    found = find_backbone(f"torchvision:{SMALL}", None)
    assert (found.input_shape, found.mean, found.std, found.width) == ((224, 224, 3), IMAGENET_MEAN, IMAGENET_STD, 1024)
    assert found.origin == "initialised from seed 0"
    assert find_backbone(f"torchvision:{SMALL}", (64, 48, 3)).input_shape == (64, 48, 3)
    grey = find_backbone(f"torchvision:{SMALL}", (64, 64, 1))
    assert len(grey.mean) == 1
    assert next(m for m in grey.net.modules() if isinstance(m, nn.Conv2d)).in_channels == 1


def test_published_weights_are_fetched_once_checked_and_told(
    cache: Path, served: Served, published: Callable[[str], None], tmp_path: Path
):
    """By torchvision's own code from a real server; the second time nobody is there any more."""
    torch.manual_seed(3)
    net = models().get_model(SMALL, weights=None)
    payload = _weights_file(net)
    name = f"net-{hashlib.sha256(payload).hexdigest()[:8]}.pth"
    published(f"{served({f'/{name}': payload})}/{name}")
    first = find_backbone(f"torchvision:{SMALL}", (64, 64, 3), weights="pretrained")
    net.fc = nn.Identity()
    assert first.facts == f"sha256 {tensors_sha256(net)} of the backbone's tensors, licence not stated by the library"
    assert first.origin == f"pretrained weights IMAGENET1K_V1 of torchvision:{SMALL}"
    assert (cache / name).read_bytes() == payload
    published(f"http://127.0.0.1:9/{name}")
    out = tmp_path / "x.bundle"
    build_bundle(
        backbone=f"torchvision:{SMALL}",
        method_name="ncm",
        labels=["a", "b"],
        input_shape=(64, 64, 3),
        weights="pretrained",
        provenance="for a test",
        out=out,
    )
    manifest = read_bundle(out).manifest
    assert manifest.provenance == f"for a test; {first.facts}"
    assert manifest.mean == pytest.approx(IMAGENET_MEAN)


def test_weights_with_another_hash_are_refused(cache: Path, served: Served, published: Callable[[str], None]):
    payload = _weights_file(models().get_model(SMALL, weights=None))
    published(f"{served({'/net-00000000.pth': payload})}/net-00000000.pth")
    with pytest.raises(DownloadError, match="invalid hash value"):
        find_backbone(f"torchvision:{SMALL}", None, weights="pretrained")
    assert not list(cache.glob("net-*"))


def test_without_a_network_there_is_one_line_soon(cache: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # refuses
    options = ["--method", "ffc", "--classes", "3", "--out", str(tmp_path / "x.bundle"), "--quiet"]
    began = time.monotonic()
    code = cli.main(["export", "--backbone", f"torchvision:{SMALL}", "--weights", "pretrained", *options])
    said = capsys.readouterr().err
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 1
    assert time.monotonic() - began < 30
    assert re.fullmatch(
        r"error: .* cannot be fetched, expected an answer of https://.*try once with a network.*", error
    )
    assert "Traceback" not in said
    assert not (tmp_path / "x.bundle").exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("torchvision:resnet19", {}, "a network of torchvision, got torchvision:resnet19, try one of resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "a network of torchvision"),
        (f"torchvision:{SMALL}", {"weights": "pretrained", "norm": "group"}, "--norm, expected the network's own"),
        ("resnet18", {"weights": "pretrained"}, "try torchvision:resnet18 or timm:resnet18"),
        (f"torchvision:{SMALL}", {"weights": "pretrained", "input_shape": (32, 32, 1)}, "images of 3 channels"),
        ("small_cnn", {"input_shape": None}, "--input, expected HxWxc"),
    ],
)
def test_what_is_not_to_be_had_is_said(name: str, options: dict, message: str):
    given = {"input_shape": (32, 32, 3), **options}
    with pytest.raises(UsageError, match=re.escape(message)):
        find_backbone(name, **given)


def test_a_library_that_is_not_there_names_the_command(monkeypatch: pytest.MonkeyPatch):
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    with pytest.raises(UsageError, match=re.escape(install_command("timm"))):
        libraries._installed("timm", absent, "timm")


@pytest.fixture
def timm():
    make_importable()
    return pytest.importorskip("timm")


def test_timms_networks_have_timms_configuration(timm):
    found = find_backbone("timm:vit_tiny_patch16_224", (32, 48, 3))  # whose size is fixed: built for this one
    assert (found.input_shape, found.width, found.mean) == ((32, 48, 3), 192, (0.5, 0.5, 0.5))
    assert find_backbone("timm:mobilenetv3_small_050", None).input_shape == (224, 224, 3)
    assert len(find_backbone("timm:resnet10t", (64, 64, 1)).mean) == 1
    with pytest.raises(UsageError, match="try one of resnet18"):
        find_backbone("timm:resnet1", None)
    with pytest.raises(UsageError, match=re.escape("try one of resnet10t.c3_in1k")):
        find_backbone("timm:resnet10t.no", None, weights="pretrained")


def test_the_hub_is_asked_as_it_wants_to_be(timm, served: Served, monkeypatch, tmp_path: Path):
    """huggingface_hub's own code against a server that answers like the hub, and then against none."""
    from huggingface_hub import constants
    from safetensors.torch import save

    net = timm.create_model("resnet10t", num_classes=4)
    config = b'{"architecture": "resnet10t", "num_classes": 4, "input_size": [3, 96, 96], "mean": [0.1, 0.2, 0.3], '
    config += b'"std": [0.4, 0.5, 0.6], "license": "cc0-1.0", "first_conv": "conv1.0", "classifier": "fc"}'
    files = {"config.json": config, "model.safetensors": save(net.state_dict())}
    address = served({f"/org/net/resolve/main/{name}": payload for name, payload in files.items()} | {"/": b""})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    found = find_backbone("hub:org/net", None, weights="pretrained")
    assert (found.input_shape, found.mean, found.std) == ((96, 96, 3), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert found.facts.endswith("licence cc0-1.0")
    net.fc = nn.Identity()
    assert tensors_sha256(net) in found.facts
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    again = find_backbone("hub:org/net", None, weights="pretrained")
    assert again.facts == found.facts
    began = time.monotonic()
    with pytest.raises(DownloadError, match="cannot be fetched"):
        find_backbone("hub:org/other", None, weights="pretrained")
    assert time.monotonic() - began < 10
    assert not constants.HF_HUB_OFFLINE


def test_side_classifiers_are_taken_off() -> None:
    """GoogLeNet returns three results while it trains, which is no function of images to features."""
    net = nn.Module()
    net.aux_logits, net.aux1, net.AuxLogits, net.fc = True, nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    found = libraries._without_side_classifiers(net)
    assert (found.aux_logits, found.aux1, found.AuxLogits) == (False, None, None)
    assert isinstance(found.fc, nn.Linear)
