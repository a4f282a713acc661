"""The sweep's page: as it is made, and in a browser, where it filters, tells, and links."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from importlib import resources

import pytest
from browser import chromium
from page_checks import check_page

from protofleet.cli import main
from protofleet.hw_profiles.accelerator.rtl_files import SOURCES
from protofleet.hw_profiles.reports.sweep_page import MOST_DRAWN, sweep_page


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page's file and the report."""
    folder = tmp_path_factory.mktemp("sweep")
    files = ["--html", str(folder / "sweep.html"), "--json", str(folder / "sweep.json")]
    axes = ["--rows", "8,16", "--cols", "8,32", "--batch", "1,4", "--mhz", "100,200", "--method", "inference,fedavg"]
    assert main(["cost", "sweep", "spherefed_convnet", "--classes", "10", *axes, *files]) == 0
    return folder / "sweep.html", json.loads((folder / "sweep.json").read_text())


def _data(html):
    return json.loads(re.findall(r'id="points">(.*?)</script>', html, re.DOTALL)[0])


def _beats(a, b):
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


def test_the_page_loads_nothing_and_has_every_point_in_each_chart(made):
    html = made[0].read_text()
    check_page(html, scripts=3)
    assert len(re.findall(r"<circle", html)) == 3 * sum(not p["published"] for p in made[1]["points"])
    assert len(re.findall(r'class="published"', html)) == 3 * 4, "SphereFed's array, for two methods and two batches"
    assert len(_data(html)) == len(made[1]["points"])


def test_a_points_command_costs_that_array(made, tmp_path):
    data, points = _data(made[0].read_text()), made[1]["points"]
    number = next(n for n, p in enumerate(points) if p["front"] and p["precision"] == "int8")
    line = data[number]["command"].split()
    assert line[:3] == ["protofleet", "cost", "spherefed_convnet"]
    line[line.index("--rtl") + 1] = str(tmp_path / "array")
    assert main([*line[1:], "--json", str(tmp_path / "c.json")]) == 0
    report = json.loads((tmp_path / "c.json").read_text())
    assert report["inference"]["latency_ms"] / points[number]["batch"] == pytest.approx(points[number]["photo_ms"])
    assert report["inference"]["memory"]["peak_bytes"] == points[number]["memory_bytes"]
    readme = (tmp_path / "array" / "README.md").read_text()
    assert f"takes about {points[number]['dsp_slices']:,} of 2,800 DSP blocks, {points[number]['luts']:,} of" in readme
    if shutil.which("verilator"):
        lint = [
            "verilator",
            "--lint-only",
            "-Wno-fatal",
            "-Wno-lint",
            "--timing",
            "--top-module",
            "testbench",
            *sorted(SOURCES),
        ]
        subprocess.run(lint, cwd=tmp_path / "array", check=True, capture_output=True)


def test_a_points_command_has_the_sweeps_own_device_file_side_and_mapping(tmp_path, capsys):
    """A device's name is text: as markup it would close what is not open. The mapping changes what the array costs."""
    name, own, sides = "my[/x]chip", tmp_path / "own.toml", ("--side", "64", "--depthwise", "packed")
    shipped = resources.files("protofleet.hw_profiles").joinpath("devices", "fpga-kv260.toml").read_text()
    own.write_text(shipped.replace('name = "fpga-kv260"', f'name = "{name}"'))
    axes = ["--rows", "8", "--cols", "8", "--sram", "512KiB", "--mhz", "100", "--batch", "2", "--method", "inference"]
    common = ["spherefed_mobilenetv2", "--devices-file", str(own), "--device", name, *sides]
    files = ["--html", str(tmp_path / "sweep.html"), "--json", str(tmp_path / "sweep.json")]
    assert main(["cost", "sweep", *common, *axes, *files]) == 0
    assert name in "".join(capsys.readouterr().out.split())
    point = json.loads((tmp_path / "sweep.json").read_text())["points"][1]
    line = shlex.split(_data((tmp_path / "sweep.html").read_text())[1]["command"])
    assert point["precision"] == "bf16"
    assert main([*line[1:], "--json", str(tmp_path / "c.json")]) == 0
    assert name in "".join(capsys.readouterr().out.split())
    inference = json.loads((tmp_path / "c.json").read_text())["inference"]
    assert inference["latency_ms"] / 2 == pytest.approx(point["photo_ms"])


def test_points_beyond_what_is_drawn_leave_the_fronts_whole(made):
    report = dict(made[1])
    beaten = next(p for p in report["points"] if not p["front"] and not p["published"])
    report["points"] = [*report["points"], *[beaten] * (2 * MOST_DRAWN)]
    html = sweep_page(report, "F.bundle")
    data = _data(html)
    assert len(data) <= MOST_DRAWN
    assert "points that others beat are not drawn" in html
    assert html.count('class="design front"') == 3 * sum(p["front"] for p in report["points"])


def test_the_page_in_a_browser(made):
    html, report = made
    with chromium() as browser:
        page = browser.open(html.as_uri())
        own = [n for n, p in enumerate(report["points"]) if p["method"] == "inference" and not p["published"]]
        assert page.run("document.getElementById('count').textContent").startswith(f"{len(own)} points, ")
        seen = "[...document.querySelectorAll('circle.front:not([hidden])')].map(c => Number(c.dataset.n))"
        assert set(page.run(seen)) == {n for n in own if report["points"][n]["front"]}, "as Python found it"

        page.tap("input[name=dataflow][value=os]")
        page.tap("input[name=precision][value=int8]")
        left = [n for n in own if (p := report["points"][n])["dataflow"] != "os" and p["precision"] != "int8"]
        assert page.run("document.getElementById('count').textContent").startswith(f"{len(left)} points, ")
        small = {n: [report["points"][n][name] for name in report["objectives"]] for n in left}
        naive = {
            n for n in left
            if not any(_beats(small[m], small[n]) for m in left)
        }  # fmt: skip
        assert set(page.run(seen)) == naive, "the front of what is left"
        assert page.run("document.querySelectorAll('.of-method:not([hidden]) tbody tr').length") == len(naive)

        page.tap(".of-method:not([hidden]) tbody button")
        fastest = min(naive, key=lambda n: small[n][0])
        told = page.run(
            "[...document.querySelectorAll('.of-method:not([hidden]) .here-figures dd')].map(d => d.textContent)"
        )
        assert told == _data(html.read_text())[fastest]["cells"]
        assert page.run("document.querySelectorAll('circle.here').length") == 3, "in each chart"
        link = page.run("location.href")
        assert "dataflow=ws%2Cis" in link
        assert "at=" in link

        other = browser.open(link, width=390, dark=True)
        for question in ("document.getElementById('count').textContent", seen):
            assert other.run(question) == page.run(question), "a link is the view"
        assert other.run("document.querySelectorAll('circle.here').length") == 3
        assert other.run("document.documentElement.scrollWidth <= innerWidth")
        other.tap("input[name=method][value=fedavg]")
        assert other.run("[...document.querySelectorAll('.of-method:not([hidden])')].map(s => s.dataset.method)") == [
            "fedavg"
        ]
        other.tap("#all")
        own = [n for n, p in enumerate(report["points"]) if p["method"] == "fedavg" and not p["published"]]
        assert other.run("document.getElementById('count').textContent").startswith(f"{len(own)} points, ")
