"""Code that a device lets go of while it waits: what is unmapped, and that everything goes on."""

import subprocess
import sys
from pathlib import Path

from protofleet.edge_client.hardware.code_pages import clean_mappings

SMAPS = """\
1000-3000 r--p 00000000 fe:00 1  /lib/libx.so
Rss:                   8 kB
Anonymous:             0 kB
3000-9000 r-xp 00002000 fe:00 1  /lib/lib of x.so
Rss:                  24 kB
Anonymous:             0 kB
9000-a000 r--p 00008000 fe:00 1  /lib/libx.so
Anonymous:             4 kB
a000-b000 rw-p 00009000 fe:00 1  /lib/libx.so
Anonymous:             0 kB
b000-c000 r--s 00000000 fe:00 2  /data/shared
Anonymous:             0 kB
c000-d000 r-xp 00000000 00:00 0  [vdso]
Anonymous:             0 kB
d000-e000 r--p 00000000 00:00 0
Anonymous:             0 kB
"""


def test_only_what_is_equal_to_its_file_is_let_go_of() -> None:
    # relocated data, data that can be written, mappings that are shared and what is of no file all stay
    assert list(clean_mappings(SMAPS.splitlines())) == [(0x1000, 0x2000), (0x3000, 0x6000)]


def file_pages() -> int:
    """Resident bytes of this process that are pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def test_what_was_let_go_of_runs_again() -> None:
    """In a process of its own: one that has run other tests may have let go of most of it before."""
    done = subprocess.run(
        [sys.executable, "-c", LETS_GO], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr


LETS_GO = """
import numpy as np
from tests.edge_client.hardware.test_code_pages import file_pages

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.edge_client.hardware.code_pages import release_code

a = np.random.default_rng(0).standard_normal((64, 64))
before, product = file_pages(), a @ a
release_code()
left = file_pages()
assert left < before / 2, (left, before)
assert np.array_equal(a @ a, product)
assert ort.get_available_providers()
"""


def test_a_device_in_anothers_process_leaves_that_ones_code_and_garbage_alone() -> None:
    done = subprocess.run([sys.executable, "-c", OWNS], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr


OWNS = """
import gc, weakref
import numpy
from tests.edge_client.hardware.test_code_pages import file_pages

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.edge_client.hardware.process_metrics import own_this_process, rest_memory

class Round:
    def __init__(self):
        self.itself = self

gc.disable()
garbage, before = weakref.ref(Round()), file_pages()
rest_memory()
assert garbage() is not None
assert file_pages() > 0.9 * before, (file_pages(), before)
own_this_process()
garbage = weakref.ref(Round())
rest_memory()
assert garbage() is None
assert file_pages() < before / 2, (file_pages(), before)
"""
