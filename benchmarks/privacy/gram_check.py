"""What checking FFC's sums costs the aggregator: milliseconds for a contribution, by feature width, on one core.

    python -m benchmarks.privacy.gram_check [--widths 128,512,1280]

`protofleet.aggregator.ingest.validation.check_sums` on the sums of 2,000 samples of 10 classes: that is unpacking the
triangle, the Schur complement and a Cholesky factor. The median of seven. The ingest target of 5,000 contributions a
second is that of prototypes (`benchmarks/server/ingest.py`); a device sends sums once in a run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from protofleet.aggregator.ingest.validation import check_sums
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.sums.statistics import FeatureGram


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="128,512,1280")
    for width in map(int, parser.parse_args().widths.split(",")):
        rng = np.random.default_rng(0)
        z = unit_rows(np.maximum(rng.normal(size=(2_000, width)), 0))
        sums = FeatureGram.of(z, rng.integers(0, 10, len(z)), 10)
        taken_ms = []
        for _ in range(7):
            began = time.process_time()
            check_sums(sums, "f64")
            taken_ms.append(1e3 * (time.process_time() - began))
        print(f"D = {width:>5,}: {statistics.median(taken_ms):7.1f} ms")


if __name__ == "__main__":
    main()
