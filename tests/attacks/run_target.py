"""One target under atheris, for as long as libFuzzer's options say: `python tests/attacks/run_target.py wire -runs=9`.

A process of its own, since libFuzzer never returns; `benchmarks/attacks/fuzz.py` starts it and reads what it says. An
input that raises is written to the file that `LAST` names: libFuzzer does not always come to write it.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
ROOMS = ["protofleet.contract", "protofleet.edge_client", "protofleet.aggregator"]


def main() -> None:
    name = sys.argv.pop(1)
    last = os.open(os.environ["LAST"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if "LAST" in os.environ else None
    with atheris.instrument_imports(include=ROOMS, enable_loader_override=False):
        from tests.attacks.registry import load

        target = load(name)
    from tests.attacks.guard import guarded

    warnings.simplefilter("error")  # an overflow that only warns would be a hole, too
    warnings.simplefilter("ignore", ResourceWarning)  # numpy leaves a broken .npz to the garbage collector
    with guarded():
        with atheris.instrument_imports(include=ROOMS, enable_loader_override=False):
            for seed in target.seeds():  # what is imported late is imported now, and so instrumented
                target.run(seed)

        def run(data: bytes) -> None:
            try:
                target.run(data)
            except BaseException:
                if last is not None:
                    os.pwrite(last, data, 0)
                raise

        atheris.Setup(sys.argv, run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
