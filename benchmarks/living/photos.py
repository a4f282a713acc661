"""The photos of a simulated month: files, and who is given, loses, is taught which. See benchmarks/living/month.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.living.books import Book
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.edge_client.data.learned import LearnedFile, example_of

MANY, FEW, MOST_AT_ONCE = 60, 10, 5


class Photos:
    """The photos of the world, and the file that each is in.

    Attributes:
        x: (N, H, W, c) uint8, no two alike.
        y: (N,) classes; the last one is the class that comes later.
        by_class: the photos of each class.
    """

    def __init__(self, folder: Path, x: NDArray[np.uint8], y: NDArray[np.int64]) -> None:
        from PIL import Image

        boots, count = x[y == y.max()], y.max() + 1  # of which two further classes are made
        x = np.concatenate([x, boots[:, :, ::-1], boots[:, ::-1]])
        y = np.concatenate([y, np.repeat([count, count + 1], len(boots))])
        _, first = np.unique([hashlib.sha256(image.tobytes()).hexdigest() for image in x], return_index=True)
        self.x, self.y = np.ascontiguousarray(x[np.sort(first)]), y[np.sort(first)]
        self.by_class = [np.flatnonzero(self.y == label) for label in range(self.y.max() + 1)]
        self._folder = folder
        folder.mkdir()
        for number, image in enumerate(self.x):
            Image.fromarray(image[..., 0]).save(folder / f"{number}.png", compress_level=1)

    def write(self, book: Book, labels: tuple[str, ...]) -> None:
        """A device's list of photos, whole or as it was."""
        book.folder.mkdir(parents=True, exist_ok=True)
        lines = ["path,label", *(f"{self._folder / f'{photo}.png'},{labels[self.y[photo]]}" for photo in book.photos)]
        (book.folder / "new").write_text("\n".join(lines) + "\n")
        (book.folder / "new").rename(book.data)


class Owners:
    """Whoever gives devices photos, takes them away and teaches them; every change is in the book as it is made.

    Args:
        old, new: the bundle that all begin with, and the one with a class more.
    """

    def __init__(self, world: Photos, old: Bundle, new: Bundle, rng: np.random.Generator) -> None:
        self._world, self._old, self._new, self._rng = world, old.manifest, new.manifest, rng

    def deal(self, book: Book, many: int) -> None:
        """So many more photos, of the classes that it sees."""
        world, rng = self._world, self._rng
        seen = [*book.classes, *([self._new.classes - 1] * 2 if book.longer else [])]
        there = {*book.photos, *book.learned}
        for label in rng.choice(seen, many):
            photo = int(rng.choice(world.by_class[label]))
            if photo not in there:
                there.add(photo)
                book.photos.append(photo)
        world.write(book, self._new.labels)

    def change(self, book: Book) -> None:
        """Some come, some go, and now and then one is taught, or no longer."""
        many, rng = len(book.photos), self._rng
        if many > MANY or (many > FEW and rng.random() < 0.3):
            gone = set(rng.choice(book.photos, int(rng.integers(1, MOST_AT_ONCE + 1)), replace=False).tolist())
            book.photos = [photo for photo in book.photos if photo not in gone]
        self.deal(book, int(rng.integers(0, MOST_AT_ONCE + 1)))
        if book.fleet == "living" and book.has_journal:
            self._teach(book)

    def _teach(self, book: Book) -> None:
        world, rng, m = self._world, self._rng, self._new if book.longer else self._old
        file = LearnedFile(book.state, m.labels)
        if book.learned and rng.random() < 0.1:
            photo = book.learned.pop(int(rng.integers(len(book.learned))))
            file.unlearn(example_of(world.x[photo], m))
        elif rng.random() < 0.15:
            photo = int(rng.choice(world.by_class[int(rng.choice(book.classes))]))
            if photo not in {*book.photos, *book.learned}:
                file.learn(example_of(world.x[photo], m), m.labels[world.y[photo]])
                book.learned.append(photo)
