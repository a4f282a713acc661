"""From a feature back to a picture: a decoder trained on public images, and how alike its pictures are to the photo.

1. `Decoder.trained` learns images from their unit features, by squared error; public images alone.
2. A released class mean goes through it. What comes out is compared with the photo behind it, beside the mean public
   image of the class, which needs no release: PSNR and SSIM (Wang et al., 2004, eq. 13, windows of 7 × 7), and how
   often the photo is the nearest of 1,000 of its class to the picture, by the correlation of their pixels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from benchmarks.attacks.attack_grounds import Ground
from benchmarks.attacks.attack_releases import Defence, Part, draw, released

__all__ = ["Decoder", "class_pictures", "inversion", "psnr", "ranked_first", "ssim"]

Pictures = NDArray[np.float32]
_WINDOW = 7
_HIDDEN = 512
_EPOCHS = 15
_MEMBERS, _OTHERS = 20, 999
_BARE = Defence("")
_NOISED = tuple(Defence(f", ncm-dp ε = {epsilon:g}", epsilon=epsilon) for epsilon in (8.0, 1.0))


class Decoder(nn.Module):
    """Unit features (B, D) to images (B, H · W · c) in 0 … 1: two hidden layers."""

    def __init__(self, width: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.Sequential(
            nn.Linear(width, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, math.prod(shape)),
            nn.Sigmoid(),
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.layers(z * math.sqrt(z.shape[1]))

    @classmethod
    def trained(cls, public: Part, epochs: int, seed: int, batch: int = 64) -> Decoder:
        """On the attacker's public images."""
        torch.manual_seed(seed)
        x = torch.from_numpy(pictures(public.x)).flatten(1)
        decoder = cls(public.z.shape[1], public.x.shape[1:])
        optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        z = torch.from_numpy(public.z).float()
        for _ in range(epochs):
            for rows in torch.randperm(len(z)).split(batch):
                optimizer.zero_grad()
                functional.mse_loss(decoder(z[rows]), x[rows]).backward()
                optimizer.step()
            schedule.step()
        return decoder.eval()

    def decoded(self, features: NDArray[np.float64]) -> Pictures:
        """Pictures (N, H, W, c) of features (N, D), brought to length 1 first, as those it was trained on are."""
        z = functional.normalize(torch.from_numpy(features).float(), dim=1)
        with torch.inference_mode():
            return np.asarray(self(z).numpy()).reshape(-1, *self.shape)


def pictures(x: NDArray[np.uint8]) -> Pictures:
    """Images (N, H, W, c) as numbers of 0 … 1."""
    return np.asarray(x, np.float32) / np.float32(255)


def class_pictures(public: Part, classes: int) -> Pictures:
    """(C, H, W, c) the mean public image of each class: what is known without any release."""
    return np.stack([pictures(public.x[public.y == label]).mean(axis=0) for label in range(classes)])


def psnr(made: Pictures, photos: Pictures) -> float:
    """Mean peak signal-to-noise ratio in dB of pictures (N, …) beside photos (N, …)."""
    error = ((made - photos) ** 2).reshape(len(made), -1).mean(axis=1)
    return float((-10.0 * np.log10(np.maximum(error, 1e-10))).mean())


def ssim(made: Pictures, photos: Pictures) -> float:
    """Mean structural similarity of pictures (N, H, W, c) and photos, in 0 … 1 at best."""
    a, b = (torch.from_numpy(np.ascontiguousarray(each)).double().permute(0, 3, 1, 2) for each in (made, photos))

    def mean(x: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(x, _WINDOW, stride=1)

    ma, mb = mean(a), mean(b)
    va, vb, both = mean(a * a) - ma**2, mean(b * b) - mb**2, mean(a * b) - ma * mb
    c1, c2 = 0.01**2, 0.03**2
    return float((((2 * ma * mb + c1) * (2 * both + c2)) / ((ma**2 + mb**2 + c1) * (va + vb + c2))).mean())


def ranked_first(made: Pictures, member: NDArray[np.uint8], others: NDArray[np.uint8]) -> bool:
    """Whether one photo (H, W, c) is more alike to the picture than each of the others (K, H, W, c)."""
    target = _centred(made[None])[0]
    return bool(_centred(pictures(member[None]))[0] @ target > (_centred(pictures(others)) @ target).max())


def _centred(x: Pictures) -> Pictures:
    flat = x.reshape(len(x), -1)
    left = flat - flat.mean(axis=1, keepdims=True)
    return np.asarray(left / np.maximum(np.linalg.norm(left, axis=1, keepdims=True), 1e-9))


def inversion(ground: Ground, samples: tuple[int, ...], seeds: int) -> list[dict[str, object]]:
    """A row for each number of samples, and one for the mean public image of the class."""
    decoder = Decoder.trained(ground.public, _EPOCHS, seed=0)
    known, part, rows = class_pictures(ground.public, ground.classes), ground.targets, []
    for count, defence in (*((n, _BARE) for n in samples), *((1, each) for each in _NOISED), (0, _BARE)):
        photos, made, first = [], [], []
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            members, others = draw(part, max(count, 1), rng)
            means, _ = released(defence, part, members, rng)
            shown = decoder.decoded(means) if count else known
            for label, mine in enumerate(members):
                rest = part.x[others[label][:_OTHERS]]
                first += [ranked_first(shown[label], part.x[row], rest) for row in mine[:_MEMBERS]]
                photos += [part.x[row] for row in mine[:_MEMBERS]]
                made += [shown[label]] * len(mine[:_MEMBERS])
        pair = np.stack(made), pictures(np.stack(photos))
        name = f"mean of {count}{defence.name}" if count else "no release: the class's mean public image"
        rows.append(
            {
                "picture from": name,
                "PSNR, dB": psnr(*pair),
                "SSIM": ssim(*pair),
                "first of 1,000, %": 100.0 * float(np.mean(first)),
            }
        )
    return rows
