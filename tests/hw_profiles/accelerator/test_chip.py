"""What an array takes of an FPGA, as Yosys counted it, and arrays that a chip cannot hold."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.accelerator.chip import (
    bank_halves,
    behind_dma,
    check_buildable,
    chip_of,
    excess_of,
    fit_counts,
    resources_of,
    share_of,
    synthesised,
)
from protofleet.hw_profiles.accelerator.simulate import Array, array_of
from protofleet.hw_profiles.devices.schema import load_devices

DEVICES = {name: device for name, device in load_devices().items() if device.systolic is not None}
TABLE = json.loads((files("protofleet.hw_profiles.accelerator") / "rtl_resources.json").read_text())
ROWS = TABLE["accelerators"]
FPGAS = ("fpga-vc707-32x64", "fpga-zcu104", "fpga-kv260", "fpga-artix7-200t")


@pytest.mark.parametrize("name", FPGAS)
def test_the_array_of_a_shipped_file_is_let_through_and_all_but_the_papers_can_be_built(name):
    chip, array = chip_of(DEVICES[name]), array_of(DEVICES[name])
    check_buildable(array, chip)
    assert (excess_of(array, chip) is None) == (name != "fpga-vc707-32x64")


@pytest.mark.parametrize("row", TABLE["accelerators"], ids=lambda row: "-".join(map(str, row[:4])))
def test_the_fit_gives_back_what_yosys_counted(row):
    family, dataflow, rows, cols, counts = row
    fitted, beside = synthesised(family, dataflow, rows, cols), behind_dma(family, dataflow)
    assert fitted["dsp_slices"] - beside["dsp_slices"] == counts[0] == rows * cols
    for name, counted in zip(TABLE["counts"][1:3], counts[1:3], strict=True):
        assert fitted[name] - beside[name] == pytest.approx(counted, rel=0.14), name


@pytest.mark.parametrize("row", TABLE["behind_dma"], ids=lambda row: "-".join(map(str, row[:4])))
def test_an_array_behind_a_dma_takes_no_less_than_what_is_said(row):
    family, dataflow, rows, cols, counts = row
    fitted = synthesised(family, dataflow, rows, cols)
    assert fitted["dsp_slices"] == counts[0] > rows * cols
    for name, counted in zip(TABLE["counts"][1:3], counts[1:3], strict=True):
        assert 0.9 * counted < fitted[name] <= 1.02 * counted, name
    copies = 2 if dataflow == "os" else 4
    assert counts[3] == (rows + cols) * bank_halves(8, 2_048) + copies * cols * bank_halves(32, 256)


def test_what_the_dma_takes_decides_whether_an_array_fits():
    chip = chip_of(DEVICES["fpga-kv260"])
    array = replace(array_of(DEVICES["fpga-kv260"], precision="int8"), rows=39, cols=32)
    assert array.rows * array.cols <= chip.has.dsp_slices
    excess = excess_of(array, chip)
    assert excess is not None
    assert (excess.name, excess.wanted) == ("DSP blocks", 39 * 32 + behind_dma("xcup", "os")["dsp_slices"])


@pytest.mark.parametrize(("dataflow", "copies"), [("os", 2), ("ws", 4), ("is", 4)])
def test_buffers_are_counted_as_the_verilog_has_them(dataflow, copies):
    """2,048 numbers in a bank of an operand, 256 in each of those of a column's results."""
    device = DEVICES["fpga-kv260"]
    array = array_of(device, precision="int8", dataflow=dataflow)
    array = replace(array, rows=4, cols=4, sram_bytes=3 * 4 * 2_048)
    halves = resources_of(array, chip_of(device)).block_ram_halves
    assert halves == 8 * bank_halves(8, 2_048) + copies * 4 * bank_halves(32, 256)


def test_the_largest_arrays_are_foretold_by_the_smaller():
    """What the fit is used for: arrays larger than any that was synthesised."""
    sizes = {(row[0], row[1]): max(r[2] * r[3] for r in TABLE["accelerators"] if r[:2] == row[:2]) for row in ROWS}
    fits = fit_counts([row for row in ROWS if row[2] * row[3] < sizes[row[0], row[1]]])
    for family, array, rows, cols, counts in ROWS:
        if rows * cols == sizes[family, array]:
            foretold = np.array([1, rows, cols, rows * cols]) @ fits[family, array]
            assert foretold[1:] == pytest.approx(counts[1:3], rel=0.15), (family, array, rows, cols)


@pytest.mark.parametrize("row", TABLE["banks"], ids=lambda row: "-".join(map(str, row[:3])))
def test_a_banks_block_ram_is_what_yosys_counted(row):
    _, width, address, counts = row
    assert bank_halves(width, 1 << address) == counts[3]


def test_an_accelerators_banks_are_those_of_its_verilog():
    for _, _, rows, cols, counts in TABLE["accelerators"]:
        assert counts[3] == (rows + cols) * bank_halves(8, 2_048) + cols * bank_halves(32, 2_048)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(FPGAS),
    rows=st.integers(1, 128),
    cols=st.integers(1, 128),
    precision=st.sampled_from(["int8", "bf16", "fp32"]),
    dataflow=st.sampled_from(["os", "ws", "is"]),
    kib=st.integers(64, 4_000),
)
def test_an_array_is_refused_exactly_where_its_share_of_the_chip_is_above_one(
    name, rows, cols, precision, dataflow, kib
):
    device = DEVICES[name]
    chip = chip_of(device)
    sram = min(kib * 1024, chip.sram_bytes - 1)
    array = replace(array_of(device, dataflow=dataflow, precision=precision), rows=rows, cols=cols, sram_bytes=sram)
    takes = resources_of(array, chip)
    assert (excess_of(array, chip) is None) == (share_of(takes, chip.has) <= 1)
    more = resources_of(replace(array, rows=rows + 1), chip)
    assert share_of(more, chip.has) >= share_of(takes, chip.has) or more.block_ram_halves < takes.block_ram_halves
    assert (takes.luts is None) == (precision != "int8")


def test_an_array_of_an_unknown_family_is_limited_by_what_is_known():
    own = DEVICES["fpga-vc707-32x64"]
    chip = chip_of(replace(own, family="", systolic=replace(own.systolic, luts=None, block_rams=None, most_mhz=None)))
    array = Array(precision="int8", mhz=5_000)
    assert resources_of(array, chip).luts is None
    assert excess_of(array, chip) is None
    with pytest.raises(UsageError, match="DSP blocks, expected at most 2,800 on the chip, got 6,400"):
        check_buildable(replace(array, rows=100), chip)


def test_a_family_that_was_not_synthesised_is_named():
    with pytest.raises(UsageError, match="family of the FPGA, expected xc7 or xcup, got ice40"):
        synthesised("ice40", "os", 8, 8)
