"""Weights for a backbone from a file: safetensors, or a torch state dict, read without running any code in it.

- Names are matched to the backbone's own, without the prefixes that training scripts leave (`module.`, `backbone.`,
  `model.`).
- A classifier's tensors are ignored and named in the result: a backbone cut at its features does not have them.
- Any other tensor that is missing, left over, misshapen or not finite is refused.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from protofleet.contract.bundle.bundle_file import pack_params
from protofleet.contract.errors import ExportError

__all__ = ["file_sha256", "load_weights", "put_tensors", "tensors_sha256"]

_PREFIXES = ("module.", "backbone.", "model.")
_CLASSIFIERS = ("fc.", "classifier.", "head.", "heads.", "aux.")
_NESTS = ("state_dict", "model_state_dict", "model")
_COUNTERS = "num_batches_tracked"


def load_weights(net: nn.Module, path: str | Path) -> list[str]:
    """Put the file's tensors into `net`; returns the names that were ignored.

    Raises:
        ExportError: when the file cannot be read safely or does not fit the backbone.
    """
    tensors = {_bare(name): tensor for name, tensor in _read(Path(path)).items()}
    own = net.state_dict()
    needed = [name for name in own if not name.endswith(_COUNTERS)]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ExportError(
            f"--weights {path}: {len(missing)} of the backbone's tensors are missing",
            expected=missing[0],
            got=", ".join(sorted(tensors)[:3]) + ", …" if tensors else "no tensors",
            hint="weights of the same backbone and the same --norm",
        )
    ignored = [name for name in tensors if name not in own]
    foreign = [name for name in ignored if not name.startswith(_CLASSIFIERS) and not name.endswith(_COUNTERS)]
    if foreign:
        raise ExportError(f"--weights {path}", expected="the backbone's tensors and a classifier's", got=foreign[0])
    for name in needed:
        _check(name, tensors[name], own[name], path)
    put_tensors(net, tensors)
    return sorted(name for name in ignored if not name.endswith(_COUNTERS))


def put_tensors(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the module's own of those names, in place; names that it does not have are passed over.

    Not `load_state_dict`: a module may ask there for the version of the file that the tensors once came from (MNASNet).
    """
    with torch.no_grad():
        for name, own in net.state_dict().items():
            if name in tensors:
                own.copy_(tensors[name])


def file_sha256(path: str | Path) -> str:
    """Hexadecimal, of the whole file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_sha256(net: nn.Module) -> str:
    """Hexadecimal, of the network's floating-point tensors as a safetensors file of float32."""
    tensors = {name: t.detach().to(torch.float32) for name, t in net.state_dict().items() if t.is_floating_point()}
    return hashlib.sha256(pack_params({name: t.contiguous().numpy() for name, t in tensors.items()})).hexdigest()


def _check(name: str, tensor: Tensor, own: Tensor, path: object) -> None:
    if tensor.shape != own.shape:
        raise ExportError(
            f"--weights {path}: {name}",
            expected=f"shape {tuple(own.shape)}",
            got=tuple(tensor.shape),
            hint="the --input and --norm that the weights were trained with",
        )
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ExportError(f"--weights {path}: {name}", expected="finite weights", got="NaN or infinity")


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _read(path: Path) -> Mapping[str, Tensor]:
    expected = "safetensors or a torch state dict"
    if not path.is_file():
        raise ExportError(f"--weights {path}", expected=expected, got="no such file", hint=f"ls -l {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        got, hint = str(error) or type(error).__name__, "saving model.state_dict()"
        raise ExportError(f"--weights {path} cannot be read safely", expected=expected, got=got, hint=hint) from None
    for nest in _NESTS:
        if isinstance(loaded, dict) and isinstance(loaded.get(nest), dict):
            loaded = loaded[nest]
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise ExportError(
            f"--weights {path}", expected=expected, got=type(loaded).__name__, hint="saving model.state_dict()"
        )
    return loaded
