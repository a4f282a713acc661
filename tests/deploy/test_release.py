"""`scripts/release`: the same bytes wherever it runs, sources that build the wheel, licences, checksums, a signature.

And the checks beside it, `oldest-check` and `wheelhouse-check` of scripts/, and that `scripts/check-all` has all three.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NOTHING_MADE = shutil.ignore_patterns(
    "__pycache__", ".git", ".venv", "build", "dist", "*.egg-info", ".*_cache", "results"
)
pytestmark = pytest.mark.timeout(900)  # three wheels are built
SOME = ("--packages", "protofleet", "--extras", "none", "--tools", sys.prefix)


def asked(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=500, **options)


def git(folder: Path, *words: str) -> None:
    who = {f"GIT_{whose}_{what}": "x@localhost" for whose in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    when = {"GIT_AUTHOR_DATE": "1790000000 +0000", "GIT_COMMITTER_DATE": "1790000000 +0000"}
    done = asked("git", "-c", "commit.gpgsign=false", *words, cwd=folder, env={**os.environ, **who, **when})
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "release"
    done = asked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This working tree as a commit: neither a wheel nor a copy of CI has a repository."""
    folder = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=NOTHING_MADE)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    return folder


@pytest.fixture(scope="module")
def dist(tree: Path, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "dist"
    done = asked(sys.executable, tree / "scripts/release", folder, *SOME, "--key", key)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("release_script", str(ROOT / "scripts/release"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.mark.slow
def test_another_folder_time_umask_and_time_zone_give_the_same_bytes(dist: Path, tree: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "clone"
    there.parent.mkdir()
    git(tmp_path, "clone", "-q", str(tree), str(there))
    for file in there.rglob("*"):
        if file.is_file() and not file.is_symlink() and ".git" not in file.parts:
            os.utime(file, (1, 1))
            file.chmod(0o700 if file.stat().st_mode & 0o100 else 0o600)
    (there / "contract" / "not_committed.py").touch()
    environment = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "LC_ALL": "C"}
    command = f"umask 077; exec {sys.executable} {there}/scripts/release {tmp_path}/dist {' '.join(SOME)}"
    done = asked("sh", "-c", command, cwd="/", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not signed: no --key" in done.stdout
    assert {file.name for file in dist.iterdir()} - {file.name for file in (tmp_path / "dist").iterdir()} == {
        "SHA256SUMS.sig"
    }
    for file in (tmp_path / "dist").iterdir():
        assert file.read_bytes() == (dist / file.name).read_bytes(), file.name


def test_the_source_distribution_is_the_commit_and_builds_the_same_wheel(
    dist: Path, tree: Path, tmp_path: Path
) -> None:
    (packed,) = dist.glob("protofleet-*.tar.gz")
    with tarfile.open(packed) as tar:
        members = {member.name.partition("/")[2]: member for member in tar}
        assert {member.name.partition("/")[0] for member in members.values()} == {packed.name.removesuffix(".tar.gz")}
        assert {(member.uid, member.gid, member.uname, member.mtime) for member in members.values()} == {
            (0, 0, "", 1790000000)
        }
        assert {member.mode for member in members.values() if member.isfile()} == {0o644, 0o755}
    committed = asked("git", "ls-files", cwd=tree).stdout.split("\n")[:-1]
    assert {name.strip('"') for name in committed if "\\" not in name} | {"PKG-INFO"} <= set(members)
    assert len(members) == len(committed) + 1
    assert members["protofleet/contract"].linkname == "../contract"
    assert {"tests/conftest.py", "tests/golden/wire_v2.json", "photos/protofleet_photos/photos.bundle"} <= set(members)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1790000000"}
    done = asked(sys.executable, "-m", "pip", "wheel", *offline, "-w", tmp_path, packed, env=environment)
    assert done.returncode == 0, done.stderr
    (again,) = tmp_path.glob("*.whl")
    assert again.read_bytes() == (dist / again.name).read_bytes()


def test_the_wheel_holds_the_licences_of_all_that_is_in_it(dist: Path, script: ModuleType) -> None:
    (wheel,) = dist.glob("*.whl")
    script.check_licences(wheel)
    with zipfile.ZipFile(wheel) as file:
        licences = [name for name in file.namelist() if ".dist-info/licenses/" in name]
        assert {name.rpartition("/")[2] for name in licences} == {"LICENSE", "NOTICE"}
        text = {name.rpartition("/")[2]: file.read(name).decode() for name in licences}
        images = file.read("protofleet/lab/data/fashion_mnist/README.md").decode()
        assert "protofleet/lab/demo/shipped/README.md" in file.namelist()
    assert "Permission is hereby granted, free of charge" in images
    assert "Apache License" in text["LICENSE"]
    for whose in ("2017 Zalando SE", "2017 Arda Mavi"):
        assert whose in text["NOTICE"]


def test_each_of_our_packages_has_a_licence_and_says_whose_its_files_are() -> None:
    for folder in ("photos", "kernels"):
        about = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert about["license-files"] == ["LICENSE", "NOTICE"]
        assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "photos.bundle" in (ROOT / "photos/NOTICE").read_text()
    assert "libprotofleet_kernels.so" in (ROOT / "kernels/NOTICE").read_text()


@pytest.mark.parametrize(
    ("left_out", "notice", "said"),
    [
        ("LICENSE", "x.bin", "expected LICENSE in it"),
        ("NOTICE", "x.bin", "expected NOTICE in it"),
        (None, "inner/x.bin and inner/data/y.bin", "expected pack/inner/data/z.bin named in NOTICE"),
        (None, "inner/x.bin, inner/data: see inner/READ.md", "expected inner/READ.md"),
        (None, "inner/x.bin; all of inner/data", None),
    ],
)
def test_a_wheel_without_a_licence_is_refused(
    left_out: str | None, notice: str, said: str | None, script: ModuleType, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "p-1-py3-none-any.whl", "w") as file:
        for name, text in (("LICENSE", "l"), ("NOTICE", notice)):
            if name != left_out:
                file.writestr(f"p-1.dist-info/licenses/{name}", text)
        for name in ("pack/inner/x.bin", "pack/inner/data/y.bin", "pack/inner/data/z.bin"):
            file.writestr(name, b"\0")
    if said is None:
        script.check_licences(tmp_path / "p-1-py3-none-any.whl")
    else:
        with pytest.raises(script.Refused, match=re.escape(said)):
            script.check_licences(tmp_path / "p-1-py3-none-any.whl")


def test_checksums_and_signature_are_checked_by_stock_tools(dist: Path, key: Path, tmp_path: Path) -> None:
    folder = tmp_path / "got"
    shutil.copytree(dist, folder)
    public = key.with_suffix(".pub").read_text().strip()
    (tmp_path / "signers").write_text(f"release@protofleet {public}\n")
    page = (ROOT / "docs/release.md").read_text()
    (check,) = (line for line in page.splitlines() if line.startswith("ssh-keygen -Y verify"))
    check = check.replace("protofleet-signers", str(tmp_path / "signers"))
    assert asked("sh", "-c", check, cwd=folder).returncode == 0
    assert asked("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=folder).returncode == 0
    (wheel,) = folder.glob("*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"!")
    assert asked("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=folder).returncode == 1
    (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text() + "\n")
    assert asked("sh", "-c", check, cwd=folder).returncode != 0


def test_each_extra_that_is_shipped_has_a_budget_and_more_is_refused(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    budget = tomllib.loads((ROOT / "scripts/sizes.toml").read_text())["megabytes"]
    shipped = {"base", *project["optional-dependencies"]} - set(script.NOT_SHIPPED)
    assert set(budget) == shipped
    assert script.beyond_budget({"base": (23, int(budget["base"] * 1e6))}, budget) == []
    assert script.beyond_budget({"base": (23, 10**9)}, budget) == [f"base 1000 of {budget['base']}"]
    assert script.beyond_budget({"other": (1, 10**6)}, budget) == ["other 1 of 0"]
    assert "1000" in capsys.readouterr().out
    assert "protofleet-photos>=1,<2" in script.closure(project, "photos")
    assert "iotcore>=0.4" in script.closure(project, "all")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("old",), "error: old, expected a new folder, got one with files, try another"),
        (("new", "--extras", "camra"), "expected some of base, parquet"),
        (("new", "--packages", "all"), "expected some of protofleet, photos, kernels, got all"),
    ],
)
def test_what_it_cannot_do_is_one_line(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    done = asked(sys.executable, ROOT / "scripts/release", *words, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("oldest-check", (), "error: scripts/oldest-check, expected PYTHON=/bin/false with the extra dev, got none"),
        ("wheelhouse-check", (".",), "expected wheels of protofleet and of photos/, got none, try scripts/release"),
    ],
)
def test_a_check_beside_it_can_be_run_and_says_what_it_lacks(
    name: str, words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    path = ROOT / "scripts" / name
    assert path.stat().st_mode & 0o111
    assert f"#     scripts/{name}" in path.read_text()
    done = asked(path, *words, cwd=tmp_path, env={**os.environ, "PYTHON": "/bin/false"})
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]


def test_each_lower_bound_can_be_read_and_tried() -> None:
    """By the pattern of scripts/oldest-check, of each dependency that it installs."""
    text = (ROOT / "scripts/oldest-check").read_text()
    (pattern,) = re.findall(r're\.match\(r"(.*?)", line\)', text)
    (extras,) = re.findall(r"^extras=(\S+)$", text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(x for e in extras.split(",") for x in project["optional-dependencies"][e])]
    assert len(named) > 15
    for line in named:
        assert re.match(pattern, line), line


def test_check_all_has_them_and_describes_each_check() -> None:
    text = (ROOT / "scripts/check-all").read_text()
    (checks,) = re.findall(r"^all=\((.*)\)$", text, re.MULTILINE)
    assert {"oldest", "release", "wheelhouse"} <= set(checks.split())
    described = re.findall(r"^#   ([a-z0-9]+) +\S", text, re.MULTILINE)
    assert described == checks.split()
    for check in described:
        assert re.search(rf"^{check}\(\) {{", text, re.MULTILINE), check
    done = asked("bash", "-n", ROOT / "scripts/check-all")
    assert done.returncode == 0, done.stderr
