"""Coverage-guided fuzzing of what others can send or leave on a disk: `tests/attacks`, under atheris (extra `fuzz`).

    python -m benchmarks.attacks.fuzz [--target wire] [--runs 100000] [--seconds 60] [--total 10000000] [--seed 1]
        [--work DIR]
                              [--jobs 2]

Each target begins with its seeds and with what is kept in `tests/attacks/corpus`, and goes on for `--runs` executions,
or `--seconds`, in processes of its own, `--jobs` targets at once. Where these are fewer than `--total` in all, the
quickest goes on for the rest.
Prints a line for each: executions, how many edges of our own code were reached, inputs that reached something new,
crashes. An input that breaks a promise is left in `--work`; mend what it
shows, and keep it as `tests/attacks/corpus/TARGET/crash-WHAT`. `--keep` adds to that folder the smallest inputs that
reached something new. Exit code 1 when anything crashed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

from tests.attacks.guard import in_memory  # noqa: E402
from tests.attacks.registry import CORPUS, TARGETS, load  # noqa: E402

RUNNER = ROOT / "tests" / "attacks" / "run_target.py"
RSS_MB, EACH_S = 2048, 10  # of the process; of one input
KEPT = 30  # inputs that `--keep` takes of a target
PROCESS_RUNS = 150_000  # then another one goes on: atheris 3.0 loses up to 10 kB an input where arrays are compared
LATER = 10_000  # further seeds: those of the processes that go on for the rest
_STATUS = re.compile(r"#(\d+)\s+\w+\s+(?:cov: (\d+) )?.*?corp: (\d+)/")
_DONE = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


@dataclass
class FuzzStatus:
    """What libFuzzer has said of a target so far."""

    runs: int = 0
    edges: int = 0
    inputs: int = 0
    crashes: int = 0
    processes: int = 0


def fuzz(name: str, work: Path, *, runs: int, seconds: int, seed: int) -> FuzzStatus:
    """Attack one target; a crash ends libFuzzer's process, and another one goes on with the next seed.

    Args:
        runs, seconds: 0 for no limit; one of both is needed.
    """
    told, began_s = FuzzStatus(), time.monotonic()
    corpus, seeds = work / name / "corpus", work / name / "seeds"
    for folder in (corpus, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    target = load(name)
    for number, data in enumerate(target.seeds()):
        (seeds / f"{number:04d}").write_bytes(data)
    while True:
        left_s = seconds - int(time.monotonic() - began_s) if seconds else 0
        if (runs and told.runs >= runs) or (seconds and left_s <= 0):
            return told
        options = {
            "runs": min(runs - told.runs, PROCESS_RUNS) if runs else PROCESS_RUNS,
            "max_total_time": left_s,
            "seed": seed + told.processes,
            "max_len": target.longest_bytes,
            "rss_limit_mb": RSS_MB,
            "timeout": EACH_S,
            "print_final_stats": 1,
            "artifact_prefix": f"{work / name}/",
        }
        before = told.runs
        _one_process(name, options, [corpus, seeds, *_kept(name)], told, work / name / "log")
        if told.runs == before:  # a seed, or what is kept, crashes: nothing can be looked for beside it
            return told


def _kept(name: str) -> list[Path]:
    return [CORPUS / name] if (CORPUS / name).is_dir() else []


def _one_process(name: str, options: dict[str, object], folders: list[Path], told: FuzzStatus, log: Path) -> None:
    flags = [f"-{key}={value}" for key, value in options.items()]
    command = [sys.executable, str(RUNNER), name, *flags, *map(str, folders)]
    before, executed, last = told.runs, 0, log.with_name("last")
    with (
        log.open("a") as file,
        tempfile.TemporaryDirectory(
            prefix="pf-fuzz-", dir=in_memory()
        ) as scratch,  # libFuzzer leaves what it has there
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=file,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": scratch, "LAST": str(last)},
        ) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            file.write(line)
            if found := _STATUS.match(line):
                executed = max(executed, int(found[1]))
                told.edges = max(told.edges, int(found[2] or 0))
                told.inputs = max(told.inputs, int(found[3]))
            elif found := _DONE.match(line):
                executed = int(found[1])
    told.runs, told.processes = before + executed, told.processes + 1
    told.crashes += process.returncode != 0
    if last.is_file() and last.stat().st_size:
        last.rename(log.with_name(f"crash-{hashlib.sha1(last.read_bytes()).hexdigest()}"))  # as libFuzzer names it


def keep(name: str, work: Path) -> int:
    """Add to the kept corpus the smallest inputs that reached something new; how many these were."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    known = {path.read_bytes() for path in (*(work / name / "seeds").iterdir(), *folder.iterdir())}
    found = {path.read_bytes() for path in (work / name / "corpus").iterdir()} - known
    chosen = sorted(found, key=lambda data: (len(data), data))[:KEPT]
    for data in chosen:
        (folder / f"found-{_digest(data)}").write_bytes(data)
    return len(chosen)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append", help="one of them; all when none is named")
    parser.add_argument("--runs", type=int, default=0, help="executions of each target; 100,000 without --seconds")
    parser.add_argument("--seconds", type=int, default=0, help="for each target")
    parser.add_argument("--total", type=int, default=0, help="executions of all targets together, at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="targets at once, each on a core of its own")
    parser.add_argument("--work", type=Path, help="keeps what was found and each crash; a folder of /tmp otherwise")
    parser.add_argument("--keep", action="store_true", help="take the smallest of what was found into tests/attacks")
    given = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("atheris, expected the package, got none, try pip install -e '.[fuzz]' (x86-64 Linux)", file=sys.stderr)
        return 2
    work = given.work or Path(tempfile.mkdtemp(prefix="pf-fuzz-"))
    runs = given.runs or (0 if given.seconds else 100_000)
    total, crashes, rates, counting = 0, 0, dict[str, float](), threading.Lock()

    def one(name: str, *, runs: int, seconds: int, seed: int) -> None:
        nonlocal total, crashes
        began_s = time.monotonic()
        told = fuzz(name, work, runs=runs, seconds=seconds, seed=seed)
        took_s = time.monotonic() - began_s
        with counting:
            total, crashes, rates[name] = total + told.runs, crashes + told.crashes, told.runs / took_s
        print(
            f"{name}: {told.runs:,} executions, {told.edges:,} edges, {told.inputs:,} inputs, {told.crashes} crashes, "
            f"seed {seed}, {took_s:.0f} s",
            flush=True,
        )

    def one_in_turn(name: str) -> None:
        one(name, runs=runs, seconds=given.seconds, seed=given.seed)
        if given.keep:
            print(f"{name}: {keep(name, work)} inputs kept in tests/attacks/corpus/{name}", flush=True)

    with ThreadPoolExecutor(given.jobs) as threads:  # each waits for a process
        for done in [threads.submit(one_in_turn, name) for name in given.target or TARGETS]:
            done.result()
    if total < given.total:
        one(max(rates, key=lambda name: rates[name]), runs=given.total - total, seconds=0, seed=given.seed + LATER)
    print(f"{total:,} executions in all")
    if crashes:
        print(f"crashes, with what each raised in TARGET/log: {work}")
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
