"""What the lab's runs cost boards: every method is known, parts add up, and the step is that of `profile`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from protofleet.contract.errors import DataError, MethodError, UsageError
from protofleet.contract.methods import METHODS
from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.latency.predict import predict
from protofleet.hw_profiles.ranges import Range
from protofleet.hw_profiles.workload.model import Layer, Tensor, Workload
from protofleet.lab.algorithms import ALGORITHMS, RULES
from protofleet.lab.algorithms.base import Algorithm, WeightRule
from protofleet.lab.board_costs.cost import Spent, boards, errors, run_of, spent
from protofleet.lab.board_costs.work import Part, Work, device_work, network
from protofleet.lab.data.datasets import Outline, outline
from protofleet.lab.engine.experiment import lab_methods
from protofleet.lab.paper_tables.config import Settings, read_table
from protofleet.lab.paper_tables.cost_page import _front, _range, _share, _support, joules_pages, wants_joules
from protofleet.lab.paper_tables.table_ledger import Sheet

RESULTS = Path(__file__).parents[3] / "results"
_, TABLE = read_table("accuracy-bytes")
SHEET = Sheet(schema="", table="accuracy-bytes", title="t", source="s", notes=[], cells=[])


def test_every_method_of_the_lab_is_a_row_and_has_its_cost() -> None:
    assert {row.settings.method for row in TABLE.rows} == set(lab_methods())
    page = (RESULTS / "accuracy-bytes-joules.md").read_text()
    for row in TABLE.rows:
        assert page.count(f"\n| {row.name} | ") == 3, row.name  # one board, the run on all, a round on all
    assert all(board.name in page for group in boards() for board in group)


def test_a_loss_that_nobody_costs_is_an_error() -> None:
    class Unheard(Algorithm):
        name, objective = "unheard", "unheard"

    with pytest.raises(MethodError, match="unheard: loss_terms, expected what its loss consists of, got none"):
        Unheard.costed_terms()
    for algorithm in ALGORITHMS.values():
        stands = METHODS.get(algorithm.objective)
        assert algorithm.costed_terms() in (("cross-entropy",), stands.loss if stands else None), algorithm.name


def test_what_algorithms_and_rules_say_of_their_cost_is_what_they_do() -> None:
    for algorithm in ALGORITHMS.values():
        assert (algorithm.statistic is not None) == (algorithm.summarise is not Algorithm.summarise), algorithm.name
    for rule in RULES.values():
        assert (rule.correction_ops > 0) == (rule.correction is not WeightRule.correction), rule.name


def test_parts_rounds_and_closings_add_up() -> None:
    tensors = {name: Tensor(name, (64, 64), "activation") for name in "ab"}
    layer = Layer("l", "Exp", "elementwise", "forward", ("a",), ("b",), vector_ops=4096)
    workload = Workload("w", 1, (layer,), tensors)
    board = load_devices()["raspberry-pi-4"]
    once = spent([Part("x", workload, 1)], board)
    assert 0 < once.seconds.low < once.seconds.value < once.seconds.high
    assert once.joules is not None
    assert board.power is not None
    assert once.joules.low == pytest.approx(once.seconds.low * board.power.active_low_w)
    one, run = run_of(Work((Part("x", workload, 3),), (Part("x", workload, 2),), 4.0), board)
    assert one.seconds.value == pytest.approx(3 * once.seconds.value)
    assert run.joules is not None
    assert run.joules.high == pytest.approx(14 * once.joules.high)
    array = load_devices()["fpga-vc707-32x64"]
    assert spent([Part("x", workload, 1)], array).joules is None  # its file gives no power
    assert Spent().plus(Spent(Range(1, 1, 1), None)).joules is None


def test_a_cost_is_as_well_founded_as_its_weakest_part() -> None:
    tensors = {name: Tensor(name, (64, 64), "activation") for name in "ab"}
    layer = Layer("l", "Exp", "elementwise", "forward", ("a",), ("b",), vector_ops=4096)
    tiny = Workload("w", 1, (layer,), tensors)
    boards_by_name = load_devices()
    board, array = boards_by_name["raspberry-pi-4"], boards_by_name["fpga-vc707-32x64"]
    net = network("small_cnn", (28, 28, 1), 10).inference
    features, sums = Part("features", net, 600), Part("statistic", tiny, 1, sums=True)
    groundless = spent([Part("x", tiny, 1)], board)
    assert (groundless.support, groundless.bounded) == ("no ground", False)
    assert groundless.reasons
    founded = spent([features], board)
    assert founded.support == predict(net, board).support.status == "extrapolated"
    assert founded.reasons == predict(net, board).support.reasons
    beside = spent([features, sums], board)
    assert (beside.support, beside.reasons) == (founded.support, founded.reasons), "a few sums change nothing"
    many = spent([features, Part("statistic", tiny, 1e6, sums=True)], board)
    assert many.support == "no ground"
    assert many.reasons[-1].endswith(" % of the time in sums over features")
    assert run_of(Work((features,), (Part("x", tiny, 1),), 4.0), board)[1].support == "no ground"
    assert spent([features, sums], array).support == "simulated"
    assert _range(groundless) == "–"
    assert _support([founded, founded]) == "extrapolated"
    assert _support([founded, groundless]) == "extrapolated 1, no ground 1"


def test_the_page_says_what_each_board_lacks() -> None:
    page = (RESULTS / "accuracy-bytes-joules.md").read_text()
    assert page.count("\n| *ground* | ") == 2
    assert "| range | ground | µJ/byte |" in page
    for board in boards()[0]:
        if board.systolic is None:
            assert f"\n- {board.name}: extrapolated: " in page, board.name


def test_the_best_are_those_that_nobody_beats() -> None:
    assert _front([0.5, 0.6, 0.6, None], [1.0, 2.0, 3.0, 0.0]) == [True, True, False, False]
    assert _front([0.5, 0.5], [1.0, 1.0]) == [True, True]


def test_what_a_device_has_is_counted_in_the_data_that_ships() -> None:
    found = outline("fashion_mnist_subset")
    assert (found.classes, found.input_shape, found.samples) == (10, (28, 28, 1), 6_000)
    with pytest.raises(DataError, match="data owner/name, expected what ships: fashion_mnist_subset, got another"):
        outline("owner/name")


@pytest.mark.parametrize(
    ("settings", "images"),
    [
        ({}, 600),
        ({"only": 1000}, 100),
        ({"local_test": 0.2}, 480),
        ({"validation": True}, 540),
        ({"validation": True, "test_samples": 0, "local_test": 0.2}, 384),
    ],
)
def test_a_device_trains_on_no_image_that_is_scored_or_left_out(settings: dict, images: int) -> None:
    given = {"method": "fedavg", "backbone": "small_cnn", "clients": 10, **settings}
    experiment = msgspec.convert(given, Settings).experiment(TABLE.data, 0)
    assert _share(experiment, Outline(10, (28, 28, 1), 6000)) == images


def test_errors_come_from_the_fit() -> None:
    assert errors()["training"]["rows"] == 11
    page = (RESULTS / "accuracy-bytes-joules.md").read_text()
    assert "Modelled, not measured" in page
    assert "11 training steps" in page


def test_only_a_whole_run_on_data_that_ships_has_the_page() -> None:
    assert wants_joules(SHEET, TABLE)
    assert not wants_joules(msgspec.structs.replace(SHEET, quick="a round"), TABLE)
    assert not wants_joules(msgspec.structs.replace(SHEET, command="protofleet lab table x --data DIR"), TABLE)
    assert not wants_joules(SHEET, msgspec.structs.replace(TABLE, charts=()))
    with pytest.raises(UsageError, match="charts joules, expected a table whose data ships"):
        joules_pages("x", SHEET, msgspec.structs.replace(TABLE, data="owner/name"))


@pytest.mark.slow
def test_the_step_is_that_of_profile(tmp_path: Path) -> None:
    from protofleet.contract.bundle.bundle_file import read_bundle
    from protofleet.export.bundles.build import build_bundle
    from protofleet.hw_profiles.reports.profile_report import Choice, profile_report

    (row,) = (each for each in TABLE.rows if each.name == "FedHKD*")
    experiment = TABLE.settings_of(row, TABLE.columns[0], quick=False).experiment(TABLE.data, 0)
    work = device_work(experiment, "head", network(experiment.backbone, (28, 28, 1), 10), 600)
    labels = [str(number) for number in range(10)]
    given = {"backbone": experiment.backbone, "method_name": "fedhkd", "input_shape": (28, 28, 1)}
    build_bundle(**given, labels=labels, out=tmp_path / "b", batch=experiment.batch, hyper=dict(experiment.hyper))
    board = load_devices()["raspberry-pi-4"]
    (found,) = profile_report(read_bundle(tmp_path / "b"), [board], Choice(samples=600))["devices"]
    mine, theirs = spent(work.round[:1], board), found["training_step"]
    assert work.round[0].times == theirs["round_steps"]
    assert mine.seconds.value == pytest.approx(theirs["round_s"], rel=1e-9)
    assert mine.joules is not None
    assert mine.joules.value == pytest.approx(theirs["energy"]["mj"] / 1e3 * theirs["round_steps"], rel=1e-9)
