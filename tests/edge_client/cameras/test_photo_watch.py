"""edge_client/cameras/photo_watch.py: which photos of a folder are new and whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from protofleet.edge_client.cameras.photo_watch import new_files


def _found(folder: Path, between: list[Callable[[], object]]) -> list[list[str]]:
    """The names that are yielded after each look, with something done between one look and the next."""
    looks: list[list[str]] = [[]]
    todo = iter(between)

    def sleep(_: float) -> None:
        step = next(todo, None)
        if step is None:
            raise KeyboardInterrupt
        step()
        looks.append([])

    with suppress(KeyboardInterrupt):  # it never ends by itself
        for name, _ in new_files([folder], 1.0, sleep=sleep):
            looks[-1].append(os.path.relpath(name, folder))
    return looks


def test_a_photo_is_taken_once_when_two_looks_find_it_the_same_and_not_empty(tmp_path: Path) -> None:
    def put(name: str, content: bytes) -> Callable[[], object]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        return lambda: (tmp_path / name).write_bytes(content)

    def nothing() -> None:
        pass

    put("b.png", b"one")()
    put("in/a.JPG", b"two")()
    put("empty.png", b"")()
    put(".hidden/c.png", b"three")()
    put(".d.png", b"four")()
    put("e.txt", b"five")()
    steps = [nothing, nothing, put("slow.png", b"1"), put("slow.png", b"12"), put("slow.png", b"123"), nothing, nothing]
    assert _found(tmp_path, steps) == [[], ["b.png", "in/a.JPG"], [], [], [], [], ["slow.png"], []]
    again = [
        nothing,
        put("b.png", b"another"),
        nothing,
        (tmp_path / "in" / "a.JPG").unlink,
        put("in/a.JPG", b"new"),
        nothing,
    ]
    looks = _found(tmp_path, again)
    assert looks[1] == ["b.png", "in/a.JPG", "slow.png"]
    assert looks[3:] == [["b.png"], [], [], ["in/a.JPG"]]


def test_another_photo_of_the_same_size_is_another_one(tmp_path: Path) -> None:
    file = tmp_path / "a.png"

    def put(into: Path, content: bytes, second: int) -> None:
        into.write_bytes(content)
        os.utime(into, ns=(0, second * 10**9))

    def in_its_place() -> None:  # with the time that the one before had
        put(tmp_path / "part", b"six", 2)
        (tmp_path / "part").rename(file)

    def nothing() -> None:
        pass

    put(file, b"one", 1)
    looks = _found(tmp_path, [nothing, lambda: put(file, b"two", 2), nothing, in_its_place, nothing])
    assert looks == [[], ["a.png"]] * 3
