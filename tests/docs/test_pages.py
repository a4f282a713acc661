"""The documentation is a tested contract: commands, options, links, the two commands, the hand-decoded bytes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from protofleet.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("lab/data/**/*.md")])
README = (ROOT / "README.md").read_text()

sys.path.insert(0, str(ROOT / "docs"))
from write_commands import NESTED, PAGE, SUBCOMMANDS, help_of, reference  # noqa: E402

# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_reference_is_what_the_commands_say_today():
    assert PAGE.read_text() == reference(), "run: python docs/write_commands.py"


INNER = [(name, sub) for name, subs in NESTED.items() for sub in subs]


@pytest.mark.parametrize("command", [*((name,) for name in COMMANDS), *INNER], ids=" ".join)
def test_every_option_of_every_command_is_in_the_reference_with_a_line_of_help(command):
    section = PAGE.read_text().split(f"## protofleet {' '.join(command)}\n")[1].split("\n## ")[0]
    options = re.findall(r"^  (?:-\w, )?(--[a-z][a-z-]*)(.*)$", help_of(*command), re.MULTILINE)
    assert options
    for option, rest in options:
        assert option in section
        assert rest.strip(), f"{option} has no help"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_subcommands_are_all_in_the_reference(name):
    listed = re.findall(r"^  ([a-z-]+)  +\S", help_of(name).split("Commands:")[1], re.MULTILINE)
    assert set(listed) == set(SUBCOMMANDS[name])


def shell_blocks(text: str) -> list[str]:
    """The lines of a page's code blocks."""
    return [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_protofleet_command_line_in_the_pages_exists_with_its_options(page):
    for line in shell_blocks(page.read_text()):
        for part in re.split(r"&&|\|", line):
            words = part.split()
            if not words or not words[0].endswith("protofleet") or len(words) < 2 or words[1] in ("COMMAND",):
                continue
            name = words[1]
            assert name in COMMANDS, line
            inner = words[2:3] if words[2:3] and words[2] in NESTED.get(name, ()) else []
            known = help_of(name, *inner)
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", part):
                assert option in known, f"{option} in: {line}"


# ── the README ───────────────────────────────────────────────────────────────────────────────────────


def test_the_readme_has_exactly_two_one_line_commands_that_install_and_run():
    lines = [line for line in shell_blocks(README) if line.startswith("python3 -m venv") and " && " in line]
    assert [line.split(" && ")[-1] for line in lines] == [".venv/bin/protofleet demo", ".venv/bin/python -m pytest"]
    for line in lines:
        assert "-c constraints.txt" in line


def test_the_readme_is_short_enough_to_be_read():
    assert len(README.splitlines()) <= 120


def extras_with_those_they_name(named: set[str]) -> set[str]:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found, left = set(), set(named)
    while left:
        extra = left.pop()
        found.add(extra)
        inner = {name for line in known[extra] if line.startswith("protofleet[") for name in re.findall(r"\w+", line)}
        left |= (inner & known.keys()) - found
    return found


@pytest.mark.parametrize(
    ("page", "commands"),
    [
        ("README.md", {"demo", "init", "broker", "aggregate"}),
        ("docs/boards.md", {"export", "profile", "broker", "aggregate", "model"}),
    ],
)
def test_what_a_page_installs_above_a_command_is_all_that_it_needs(page, commands):
    """On a workstation, by whoever does one section after the other; whoever runs the tests has everything."""
    beside = {"profile": "export", "advise": None}  # which extra a command needs for what the page promises of it
    installed: set[str] = set()
    checked = []
    parts = [part.strip() for whole in shell_blocks((ROOT / page).read_text()) for part in whole.split(" && ")]
    for line in parts:
        if found := re.search(r"\.venv/bin/pip install -c constraints\.txt -e '\.\[([a-z,]+)\]'", line):
            installed |= extras_with_those_they_name(set(found.group(1).split(",")) - {"dev"})
        elif line.startswith(".venv/bin/protofleet "):
            name = line.split()[1]
            needs = beside.get(name, COMMANDS[name].extra)
            assert needs is None or extras_with_those_they_name({needs}) <= installed, line
            checked.append(name)
    assert commands <= set(checked)


def test_ci_runs_the_test_command_of_the_readme_and_its_tests_come_last():
    script = (ROOT / ".ci" / "run").read_text()
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"]).returncode == 0
    pattern = re.search(r"grep -m 1 -E '([^']+)' README.md", script)
    assert pattern
    found = [line for line in README.splitlines() if re.search(pattern.group(1), line)]
    assert len(found) == 1
    assert [line for line in script.splitlines() if line.strip()][-1] == 'bash -c "$tests"'
    for step in (
        "ruff check .",
        "ruff format --check .",
        "bin/mypy",
        "lint-imports",
        "protofleet demo",
        "benchmarks.attacks.fuzz --seconds",
        'bash -c "$install"',
    ):
        assert step in script
    assert "PROTOFLEET_CI=1" in script


def test_the_constraints_pin_everything_that_the_project_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {re.match(r"[A-Za-z0-9_-]+", requirement).group().lower().replace("_", "-") for requirement in named}
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert names - {"protofleet", "protofleet-kernels", "protofleet-photos"} <= pinned.keys()  # of this repository
    assert pinned["torch"] == "2.13.0"
    assert pinned["torchvision"] == "0.28.0"


def test_slow_tests_are_named_where_their_command_stands():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert ".venv/bin/python -m pytest -m slow" in shell_blocks(text)
    tests = ROOT / "tests"
    marked = [file for file in tests.rglob("test_*.py") if "pytest.mark." + "slow" in file.read_text()]
    files = {file.relative_to(tests).as_posix() for file in marked}
    assert files == set(re.findall(r"^\| `([\w/]*test_\w+\.py)` \|", text, re.MULTILINE))


# ── links ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_picture_of_a_page_exists(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{target} in {page.name}"
        assert not anchor or anchor in anchors(file), f"{target} in {page.name}"


def test_every_page_of_docs_can_be_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached or not page.exists():
            continue
        reached.add(page)
        if page.is_dir():
            left += list(page.glob("*.md"))
        elif page.suffix == ".md":
            targets = re.findall(r"\]\(([^)\s#]+)\)", page.read_text())
            left += [(page.parent / target).resolve() for target in targets if "://" not in target]
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} <= reached


@pytest.mark.parametrize("page", ["architecture.md", "wire.md", "bundle.md"])
def test_every_file_named_in_a_page_of_docs_exists(page):
    files, folders = r"[a-z_./]+/[a-z_0-9.]*\.(?:py|cddl|toml|json|md|j2)", r"[a-z_.]+/[a-z_./]+/"
    for name in re.findall(f"`({files}|{folders})`", (ROOT / "docs" / page).read_text()):
        assert (ROOT / name).exists(), name


def test_decisions_are_numbered_once_and_say_context_decision_and_cost():
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [page.name[:3] for page in pages]
    assert len(numbers) == len(set(numbers)) > 3
    for page in pages:
        text = page.read_text()
        assert re.match(rf"# {page.name[:3]}: ", text), page.name
        for part in ("Context", "Decision", "Cost"):
            assert part in text, f"{part} in {page.name}"


def test_the_index_of_decisions_has_each_with_its_title_date_and_status():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    row = re.compile(
        r"\| \[(\d{3})\]\((\S+)\) \| ([^|]+) \| ([^|]*) \| (\d{4}-\d\d-\d\d) \| (accepted|replaced by \d{3}) \|"
    )
    start, *topics = re.split(r"^## ", index, flags=re.MULTILINE)
    assert re.findall(r"^- \[(.+)\]\(#", start, re.MULTILINE) == [topic.splitlines()[0] for topic in topics]
    listed = {}
    for topic in topics:
        numbers = []
        for line in topic.splitlines():
            if not line.startswith("| ["):
                continue
            found = row.fullmatch(line)
            assert found, line
            number, name, title, holds, _, status = found.groups()
            assert holds.strip(), f"what holds today: {name}"
            assert status == "accepted" or holds.startswith(f"Replaced: see {status[-3:]}. "), name
            assert name not in listed, f"{name} twice"
            listed[name] = (number, title, status)
            numbers.append(number)
        assert numbers, topic
        assert numbers == sorted(numbers), topic.splitlines()[0]
    expected = {}
    for page in folder.glob("[0-9]*.md"):
        text = page.read_text()
        title = re.sub(r" \(replaces \d{3}\)$", "", text.splitlines()[0].split(": ", 1)[1])
        replaced = re.search(r"^Replaced by (\d{3})\.$", text, re.MULTILINE)
        expected[page.name] = (page.name[:3], title, f"replaced by {replaced.group(1)}" if replaced else "accepted")
    assert listed == expected


# ── the house ───────────────────────────────────────────────────────────────────────────────────────────────────────

ONE_OF_A_KIND = (
    "aggregator/database/engines",  # whose files all are the same kind of thing, found by their names
    "contract/methods",
    "export/objectives",
    "hw_profiles/charts",
    "lab/algorithms",
    "protofleet/commands",
)
HOUSE = ("protofleet", "lab", "edge_client", "aggregator", "export", "hw_profiles", "contract")


def folders_of_code() -> list[Path]:
    found = {path.parent for room in (*HOUSE, "tests", "benchmarks") for path in (ROOT / room).rglob("*.py")}
    return sorted(folder for folder in found if not any(part.is_symlink() for part in (folder, *folder.parents)))


def test_every_folder_says_what_lives_there_and_has_room_for_a_look():
    for folder in folders_of_code():
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        most = 40 if folder == ROOT / "tests" / "support" else 18
        assert len(modules) <= most, folder
        place = folder.relative_to(ROOT).as_posix()
        if place.split("/")[0] in HOUSE and "/" in place and modules:
            said = (folder / "__init__.py").read_text().split('"""')[1]
            assert len(said) > 30, folder
            for module in modules if place not in ONE_OF_A_KIND else ():
                assert re.search(rf"(?<![\w/]){module.stem}(?!\w)", said), f"{module} in {place}/__init__.py"


def test_the_page_draws_the_folders_that_there_are():
    """Each of the four that have several, as `pyproject.toml` orders them."""
    text = (ROOT / "docs" / "architecture.md").read_text().split("## The folders of a room")[1].split("```")[1]
    rows = [line for line in text.splitlines() if line.strip()]
    columns = [rows[0].index(name) for name in rows[0].split()]
    drawn = {
        name: [row[at : at + 15].strip() for row in rows[1:] if row[at : at + 15].strip()]
        for name, at in zip(rows[0].split(), columns, strict=True)
    }
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert all(c["exhaustive"] for c in contracts if "containers" in c)  # a new folder has to be put in its place
    ordered = {c["containers"][0].removeprefix("protofleet."): c["layers"] for c in contracts if "containers" in c}
    for name, folders in drawn.items():
        assert folders == [layer for layer in ordered[name] if (ROOT / name / layer).is_dir()]


def test_nothing_cites_a_document_that_the_project_does_not_contain():
    word = "DESI" + "GN"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    found = [file for file in ROOT.rglob("*") if not {".venv", "venv"} & set(file.relative_to(ROOT).parts)]
    files = [ROOT / name for name in listed if name] or found
    for file in files:
        if file.suffix in (".py", ".md", ".toml", ".cddl", ".j2", ".conf", ".txt") and file.is_file():
            assert word not in file.read_text(), file


# ── facts that pages repeat ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_bytes_decoded_by_hand_are_the_golden_ones():
    text = (ROOT / "docs" / "wire.md").read_text().split("## By hand")[1]
    lines = [line for line in shell_blocks(text) if ";" in line]
    by_hand = "".join(line.split(";")[0] for line in lines).replace(" ", "")
    golden = json.loads((ROOT / "tests" / "golden" / "wire_v2.json").read_text())
    assert by_hand == golden["messages"]["contribution-means"]["bytes"]["f32"]


def test_the_limits_and_waits_of_the_wire_page_are_those_of_the_code():
    from protofleet.aggregator.ingest import ingest, refusal_rate
    from protofleet.aggregator.server import ending
    from protofleet.contract.sums.plausibility import LARGEST_NORM
    from protofleet.contract.wire.chunks import Assembler
    from protofleet.edge_client.device import global_state_check
    from protofleet.edge_client.messages.outbox import MAX_CHUNK_BYTES, Outbox

    text = " ".join((ROOT / "docs" / "wire.md").read_text().split())
    waits = {"first_wait_s": 10.0, "max_wait_s": 4 * 3600.0, "seal": None}
    assert Outbox.__init__.__kwdefaults__ == waits
    assert "waits 5 to 10 s" in text
    assert "up to 2 to 4 hours" in text
    assert (MAX_CHUNK_BYTES, Assembler().max_contribution_bytes) == (64 << 10, 64 << 20)
    assert "larger than 64 KiB" in text
    assert "more than 64 MiB" in text
    view = ingest.View(bytes(4), bytes(32), classes=10, width=32, round=1, method="fedproto", open=True)
    assert ingest.largest_contribution_bytes(view) == 8 * 10 * 32 + 16 * 10 + 4_096
    assert "8 bytes for each number that the method sends (see below), 16 for each class and 4,096 beside" in text
    assert (ingest.STALL_S, ingest.MAX_QUESTIONS, ingest._MIN_CHUNK_BYTES) == (5.0, 6, 512)
    assert "5, 10, 20 … s after the last chunk came, six times" in text
    assert "1 + total/512 of them" in text
    assert (refusal_rate._DEVICE_BURST, refusal_rate._DEVICE_EACH_S) == (4, 1.0)
    assert "four at once for a device, then one a second" in text
    assert (global_state_check.FOREIGN, LARGEST_NORM) == (100.0, 1e6)
    assert "more than 100 times its own longest class mean, of norm above 10⁶" in text
    assert ending.GRACE_S == 40.0
    assert "up to 40 s" in text


def test_the_defaults_that_pages_name_are_those_of_the_code():
    from protofleet.aggregator.ingest.validation import MAX_SAMPLES
    from protofleet.aggregator.rounds.round_machine import DEADLINE_S
    from protofleet.contract.bundle.bundle_file import SCHEMA
    from protofleet.contract.methods import METHODS
    from protofleet.contract.wire.codec import WIRE_VERSION

    assert f"waits {DEADLINE_S:.0f} s (`--deadline`)" in (ROOT / "docs/boards.md").read_text()
    assert f"(`ridge={METHODS['ffc'].hyper['ridge'].default}`)" in (ROOT / "docs/methods.md").read_text()
    assert f"{MAX_SAMPLES:,} by default" in next(ROOT.glob("docs/decisions/077*")).read_text()
    assert (ROOT / "docs/bundle.md").read_text().startswith(f"# The bundle, schema {SCHEMA}\n")
    assert (ROOT / "docs/wire.md").read_text().startswith(f"# The wire, version {WIRE_VERSION}\n")
    assert f"wire {WIRE_VERSION} and bundle schema {SCHEMA}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_topics_of_the_wire_page_are_those_of_the_code():
    from protofleet.contract.wire import topics

    text = (ROOT / "docs" / "wire.md").read_text()
    for topic in (topics.round_("f"), topics.up("f", "d"), topics.down("f", "d"), topics.status("f", "d")):
        pattern = topic.replace("/f/", "/{fleet}/").removesuffix("/d") + ("/{device}" if topic.endswith("/d") else "")
        assert f"`{pattern}`" in text
    assert "`pf/v2/{fleet}/global/{i}`" in text


def test_every_method_is_on_the_wire_page_with_what_comes_back_and_whose_features_it_is_over():
    from protofleet.contract.methods import METHODS

    text = (ROOT / "docs" / "wire.md").read_text()
    lines = text.splitlines()
    rows = {
        name: line for line in lines if line.startswith("| `") for name in re.findall("`(.*?)`", line.split("|")[1])
    }
    over_the_bundles_own = next(line for line in lines if "the bundle's own (`" in line)
    for name, found in METHODS.items():
        assert all(f"`{kind}`" in rows[name] for kind in found.global_rows), name
        assert (f"`{name}`" in over_the_bundles_own) == (found.extractor == "bundle"), name


def test_every_field_and_member_of_a_bundle_is_on_its_page():
    from protofleet.contract.bundle.bundle_file import STEP_INPUTS, Manifest

    text = (ROOT / "docs" / "bundle.md").read_text()
    for name in (*Manifest.__struct_fields__, *STEP_INPUTS):
        assert f"`{name}`" in text, name
    for member in ("manifest.json", "features.onnx", "train_step.onnx", "params.safetensors", "manifest.sig"):
        assert f"`{member}`" in text


def test_every_promise_of_the_security_page_names_a_test_that_exists():
    text, promises = (ROOT / "docs" / "security.md").read_text(), 0
    for table in re.findall(r"^\| .* \| shown by \|\n(?:\| --- )+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            promises += 1
            assert re.search(r"`[\w/]+\.py::test_\w+`", row.split(" | ")[-1]), row
    assert promises > 25
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", text))
    assert len(named) == len(set(re.findall(r"`[\w/]*\.py::[^`]*`", text)))  # none that the pattern passes over
    for file, name in sorted(named):
        assert re.search(rf"^ *def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_no_page_or_source_names_the_machine_it_was_written_on():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    files = [ROOT / name for name in listed if name] or [*ROOT.glob("*/*.py"), *PAGES]
    home = re.compile(r"/(?:home|Users|root|work)/\w+")
    for file in files:
        if file.suffix in (".py", ".md", ".toml", ".txt", ".cddl", ".json", ".conf") and file.exists():
            assert not home.search(file.read_text()), file


def test_the_version_of_the_package_is_in_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert shlex.split(project["license"]) == ["Apache-2.0"]
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
