"""What `--on-motion` takes for motion: pictures of a still scene under noise and other light, and with an object.

    python -m benchmarks.device.motion [--pairs 200] [--seed 0] [--gain 0.6 1.4] [--level 25]

Scenes are mosaics of the photos that ship with the demo (hands), 640 x 480, which have the texture of a camera's.
Of each pair the second picture has new noise, a light of its own (each pixel is multiplied by a number of `--gain`, and
up to `--level` grey levels are added or taken; what is then above 255 or below 0 is cut off, as a sensor does), and is
coded as a JPEG of quality 50. As an object an upright piece of another photo, twice as high as wide, lies somewhere in
it. The table has for each noise how many still scenes are taken for motion, and how many objects of which share of the
picture are found.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofleet.edge_client.cameras.camera import Picture
from protofleet.edge_client.cameras.motion import CELLS, changed_cells

NOISES, SHARES = (0.0, 4.0, 8.0, 16.0, 32.0), (0.0, 0.0025, 0.005, 0.01, 0.02, 0.05)
SIZE = (640, 480)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="of each cell of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gain", type=float, nargs=2, default=(0.6, 1.4))
    parser.add_argument("--level", type=float, default=25.0)
    options = parser.parse_args()
    light = (*options.gain, options.level)
    photos = shipped()
    print("noise, grey levels | still | " + " | ".join(f"object {share:.2%}" for share in SHARES[1:]))
    for noise in NOISES:
        found = [
            np.mean([is_motion(photos, share, noise, light, [options.seed, row]) for row in range(options.pairs)])
            for share in SHARES
        ]
        print(f"{noise:g} | " + " | ".join(f"{share:.1%}" for share in found))
    return 0


def shipped() -> list[Image.Image]:
    """The demo's photos."""
    with zipfile.ZipFile(str(files("protofleet.lab.demo") / "shipped" / "sign_digits.zip")) as names:
        found = [name for name in sorted(names.namelist()) if not name.endswith("/")][::7]
        return [Image.open(io.BytesIO(names.read(name))).convert("L") for name in found]


def is_motion(
    photos: list[Image.Image], share: float, noise: float, light: tuple[float, float, float], seed: list[int]
) -> bool:
    """Whether a scene and the same one again, with an object of this share of it, are told apart."""
    rng = np.random.default_rng(seed)
    scene = Image.new("L", SIZE)
    for place in range(12):
        photo = photos[rng.integers(len(photos))].resize((160, 160))
        scene.paste(photo, (place % 4 * 160, place // 4 * 160))
    before = seen(scene, noise, (1.0, 0.0), rng)
    if share:
        high = round(np.sqrt(2 * share * SIZE[0] * SIZE[1]))
        wide = high // 2
        at = (int(rng.integers(0, SIZE[0] - wide)), int(rng.integers(0, SIZE[1] - high)))
        scene.paste(photos[rng.integers(len(photos))].resize((wide, high)), at)
    after = seen(scene, noise, (rng.uniform(*light[:2]), rng.uniform(-light[2], light[2])), rng)
    return changed_cells(before, after) >= CELLS


def seen(scene: Image.Image, noise: float, light: tuple[float, float], rng: np.random.Generator) -> NDArray[np.float32]:
    """The cells of a scene as a camera gives it."""
    gain, level = light
    x = np.asarray(scene, float) * gain + level + rng.normal(0, noise, (SIZE[1], SIZE[0]))
    out = io.BytesIO()
    Image.fromarray(np.clip(x, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=50)
    _, cells = Picture(out.getvalue(), 0.0).fitted((48, 64, 1))
    if not isinstance(cells, np.ndarray):
        raise TypeError("no picture")
    return cells[..., 0].astype(np.float32)


if __name__ == "__main__":
    sys.exit(main())
