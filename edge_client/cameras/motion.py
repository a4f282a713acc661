"""Whether anything has moved before a camera: a picture against the last one that was wanted.

1. A picture is averaged down to 64 x 48 cells of grey; with a crop, the part that counts is. So noise of single pixels
   is small.
2. A change of light or exposure is a line: every cell becomes a v + b. a and b are fitted to the cells that follow such
   a line best, three quarters of them (least trimmed squares, by concentration steps: Rousseeuw and Van Driessen, DMKD
   2006), and what is left beside the line is looked at.
3. A cell has changed where that is more than `CHANGE` of 255 grey levels, or more than six of the standard deviations
   that the median of all cells tells (Rosin and Ellis, BMVC 1995), where noise is larger.
4. Something has moved where `CELLS` cells, 0.3 % of the picture, have changed.

The picture before is the one that was wanted last, and not the one that was looked at last. So what came and stays is
one picture, what moves slowly is seen, too, and what goes away again is another picture.

It is not told from motion: a lamp that lights a part of the scene, a camera that goes over to infrared, leaves and
shadows. What comes and goes between two looks is not seen; of a stream these are key frames.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofleet.edge_client.cameras.camera import Picture
from protofleet.edge_client.data.decode import Broken, Crop

__all__ = ["CELLS", "CHANGE", "LOOK_S", "STILL_S", "Motion", "changed_cells"]

LOOK_S = 1.0  # between two looks, unless pictures are wanted more often
STILL_S = 600.0  # a picture so often where all is still, or each `every_s`: so a camera that still works is seen to
CHANGE = 12.0  # grey levels of 255
CELLS = 9  # of 64 x 48
_SHAPE = (48, 64, 1)
_SIGMAS, _MOST = 6.0, 32.0  # standard deviations of noise, and the grey levels that they are at most taken for
_TO_SIGMA = 1.4826  # from the median of absolute values of a normal distribution
_FITTED, _STEPS = 0.75, 4
_GAINS = (0.25, 4.0)


class Motion:
    """Says of each picture of one camera whether it is wanted.

    Args:
        every_s: pictures that are wanted are at least so many seconds apart.
        crop: the part of the pictures that counts.

    Attributes:
        look_s: the seconds between two pictures that are to be looked at.
    """

    def __init__(self, every_s: float, crop: Crop | None = None) -> None:
        self.look_s = min(every_s, LOOK_S)
        self._every_s, self._crop = every_s, crop
        self._before: NDArray[np.float32] | None = None
        self._wanted_s = float("-inf")

    def is_wanted(self, picture: Picture) -> bool:
        """Whether something has moved since the last picture that was wanted, or that was long ago.

        The first picture is wanted. So is one that cannot be read, since that is to be told.
        """
        passed_s = picture.taken_s - self._wanted_s
        if 0 <= passed_s < self._every_s:  # below 0 the clock was set
            return False
        _, x = picture.fitted(_SHAPE, self._crop)
        if not isinstance(x, Broken):
            now, before = x[..., 0].astype(np.float32), self._before
            if before is not None and 0 <= passed_s < STILL_S and changed_cells(before, now) < CELLS:
                return False
            self._before = now
        self._wanted_s = picture.taken_s
        return True


def changed_cells(before: NDArray[np.float32], now: NDArray[np.float32]) -> int:
    """How many cells of two pictures (H, W), grey levels 0 to 255, differ by more than light and noise do."""
    v, w = before.ravel().astype(np.float64), now.ravel().astype(np.float64)
    left = _beside_the_line(v, w)
    limit = max(CHANGE, min(_SIGMAS * _TO_SIGMA * float(np.median(left)), _MOST))
    return int((left > limit).sum())


def _beside_the_line(v: NDArray[np.float64], w: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far each cell of `w` is from a v + b, which no camera shows above 255 or below 0."""
    kept = slice(None)
    left = np.abs(w - v)
    for _ in range(_STEPS):
        a, b = _line(v[kept], w[kept])
        left = np.abs(w - np.clip(a * v + b, 0.0, 255.0))
        count = int(_FITTED * len(v))
        kept = np.argpartition(left, count)[:count]  # type: ignore[assignment]
    return left


def _line(v: NDArray[np.float64], w: NDArray[np.float64]) -> tuple[float, float]:
    """Least squares; where nothing differs in the picture before, only the level is fitted."""
    middle, spread = float(v.mean()), float(v.var())
    a = float(((v - middle) * (w - w.mean())).mean()) / spread if spread > 1.0 else 1.0
    a = min(max(a, _GAINS[0]), _GAINS[1])
    return a, float(w.mean()) - a * middle
