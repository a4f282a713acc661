"""Shared by all tests: real bundles, exported once a session, and the real images that ship with the project."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import shared
from browser import Browser, chromium
from edge_samples import FASHION_LABELS
from postgres_server import ENGINES, SLOW_ON_A_SERVER, Places, end_session, need_postgres

from protofleet.contract.console.logs import told
from tests import costs

_NO_PARAMETERS = SimpleNamespace(id="")
LONG = (  # folders, and files without their `.py`
    "aggregator/commands/test_fleet_status",
    "aggregator/server/test_liveness",
    "aggregator/server/test_server",
    "contract/wire/test_cddl",
    "deploy/test_release",
    "docs/test_library",
    "docs/test_notebooks",
    "edge_client/device/test_methods",
    "edge_client/privacy/test_policy",
    "edge_client/run/test_client",
    "edge_client/run/test_stays",
    "edge_client/answers/test_camera_answers",
    "edge_client/answers/test_predict",
    "edge_client/answers/test_probabilities",
    "export/bundles/test_build",
    "export/bundles/test_features",
    "export/steps/test_step",
    "fleet/",
    "lab/",
    "protofleet/commands/test_model",
    "protofleet/test_interrupt",
    "protofleet/test_methods_commands",
    "protofleet/test_silence",
)

FAST = (  # of each room what needs no broker, no database server and next to no process: `--fast` collects these alone
    "aggregator/ingest/",
    "aggregator/merging/test_ffc",
    "aggregator/merging/test_merge_rules",
    "aggregator/merging/test_methods",
    "aggregator/merging/test_references",
    "aggregator/rounds/",
    "aggregator/screening/test_outliers",
    "aggregator/screening/test_vouched",
    "attacks/test_lossy_fleet",
    "attacks/test_lossy_standing",
    "contract/heads/",
    "contract/methods/",
    "contract/settings/",
    "contract/sums/",
    "contract/wire/",
    "docs/test_pages",
    "edge_client/answers/test_photos_to_name",
    "edge_client/answers/test_suggestions",
    "edge_client/cameras/test_camera",
    "edge_client/cameras/test_sources",
    "edge_client/data/test_activations",
    "edge_client/device/test_calibration",
    "edge_client/identity/",
    "edge_client/messages/test_outbox",
    "edge_client/privacy/test_ledger",
    "edge_client/rollout/test_rollout_decisions",
    "edge_client/rounds/",
    "export/modules/",
    "export/objectives/",
    "hw_profiles/accelerator/test_chip",
    "hw_profiles/accelerator/test_dram",
    "hw_profiles/accelerator/test_memory_system",
    "hw_profiles/accelerator/test_sweep",
    "hw_profiles/accelerator/test_systolic",
    "hw_profiles/devices/",
    "lab/data/test_partition",
    "lab/data/test_shift",
    "lab/data/test_validation",
    "lab/paper_tables/test_metrics",
    "lab/paper_tables/test_tables",
    "protofleet/gateway/test_followed_rounds",
    "protofleet/gateway/test_rounds_site",
    "protofleet/gateway/test_standing_site",
    "protofleet/gateway/test_unfit_devices",
    "protofleet/pki/test_pki",
)

# Workers and the hundreds of processes that tests start read the same files: what one of them compiled the others find,
# also where the environment tells Python to keep nothing, as images of containers often do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what runs in its background with Ctrl-C ignored, and our children would inherit that: the tests that
# interrupt one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the fast part of the default run alone (CONTRIBUTING.md)")
    parser.addoption("--costs", type=Path, help="append each test's processor seconds to this file (tests/costs.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast` no other file is even imported, which would take longer than those tests do."""
    if not config.getoption("--fast") or collection_path.is_dir():
        return None
    return None if _place(collection_path).startswith(FAST) else True


def pytest_configure(config: pytest.Config) -> None:
    """One thread for torch: the networks are small, and on a busy machine threads wait for each other. For the same
    reason no example of a property has a deadline."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hypothesis.settings.register_profile("protofleet", deadline=None)
    hypothesis.settings.load_profile("protofleet")
    if (file := config.getoption("--costs")) is not None:
        is_worker = hasattr(config, "workerinput")
        if is_worker or not config.getoption("numprocesses", None):
            config.pluginmanager.register(costs.Recorder(file.resolve()))
        if not is_worker:
            config.pluginmanager.register(costs.Table(file.resolve()))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker reads the files from its share of them on, round to where it began: all of them import all, and what
    pytest compiles of a file in a fresh copy is then compiled by one, and found by the others."""
    report = yield
    if collector.path == Path(__file__).parent and "PYTEST_XDIST_WORKER" in os.environ:
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(report.result) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


def _place(file: Path) -> str:
    """A file of tests by its place in this folder, without its `.py`."""
    return file.relative_to(Path(__file__).parent).with_suffix("").as_posix()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, so that the workers end together; of those with a store, some are slow where that
    is on a server."""
    for item in items:
        if _place(item.path) in SLOW_ON_A_SERVER and "postgres" in getattr(item, "callspec", _NO_PARAMETERS).id.split(
            "-"
        ):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (not _place(item.path).startswith(LONG), item.path))


def pytest_collection_finish() -> None:
    shared.settle()


@pytest.fixture(scope="session", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    shared.keep_in((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared")


@pytest.fixture(scope="session")
def exported() -> Callable[..., Path]:
    """`exported(**options)`: the file of a bundle, by the options of `protofleet.export.bundles.build.build_bundle`
    but `out`."""
    return shared.exported


@pytest.fixture(scope="session")
def mnist_like_bundle(exported: Callable[..., Path]) -> Callable[..., Path]:
    """`mnist_like_bundle(method="fedproto", **options)`: the file of a small_cnn bundle for 28×28×1, ten classes."""

    def make(method: str = "fedproto", **options: object) -> Path:
        settings = {"backbone": "small_cnn", "labels": FASHION_LABELS, "input_shape": (28, 28, 1), **options}
        return exported(method_name=method, **settings)

    return make


@pytest.fixture(scope="session")
def lab_bundle(exported: Callable[..., Path]) -> Callable[..., Path]:
    """`lab_bundle(method="fedproto", **hyper)`: the file of a bundle over FedProto's MNIST network, D = 50."""

    def make(method: str = "fedproto", **hyper: object) -> Path:
        shape = {"backbone": "fedproto_mnist", "labels": FASHION_LABELS, "input_shape": (28, 28, 1)}
        return exported(method_name=method, **shape, hyper=hyper, batch=8, seed=3)

    return make


@pytest.fixture(params=ENGINES)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    """`places("s")`: where a store may be, a file of that name or a schema of its own on a server; the test runs with
    both. The same name is the same place."""
    if request.param == "sqlite":
        yield lambda name: os.fspath(tmp_path / name)
        return
    server, made = need_postgres(), dict[str, str]()

    def place(name: str) -> str:
        if name not in made:
            made[name] = server.used_place()
        return made[name]

    yield place
    for each in made.values():
        server.give_back(each)


def pytest_sessionfinish() -> None:
    end_session()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, one for a file of tests."""
    with chromium() as found:
        yield found


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What our modules say, of level INFO or more, line by line, from any thread."""
    lines: list[str] = []
    with told(lines.append):
        yield lines
