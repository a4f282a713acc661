"""How a method is found: in the folder, as an entry point of an installed package, as a class that is named."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from protofleet.contract import methods
from protofleet.contract.errors import DivergedError, MethodError
from protofleet.contract.methods import METHODS, load_method, method, runs_on

COMPLETE = {
    "name": "'spread'",
    "title": "'FedSpread'",
    "source": "'a notebook'",
    "summary": "'class means, each holder one vote'",
    "sends": "'class means'",
    "inference": "'nearest prototype'",
    "way": "'prototype'",
}
_numbers = itertools.count()
Install = Callable[..., str]


def source(facts: Mapping[str, str] = COMPLETE, **changed: str | None) -> str:
    """A module with a class `Mine` that says these facts; None leaves one out."""
    kept = {name: value for name, value in {**facts, **changed}.items() if value is not None}
    lines = "".join(f"    {name} = {value}\n" for name, value in kept.items())
    return f"from protofleet.contract.methods import Method\n\nclass Mine(Method):\n{lines}"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test's own: what it installs and names is forgotten after it."""
    fresh = methods._Registry()
    monkeypatch.setattr(methods, "METHODS", fresh)
    yield
    importlib.invalidate_caches()


@pytest.fixture
def install(registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Writes a package as pip leaves it, its module and its dist-info folder; gives the module's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str, **entries: str) -> str:
        module = f"installed_{next(_numbers)}"
        (tmp_path / f"{module}.py").write_text(text)
        folder = tmp_path / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        points = "".join(f"{name} = {module}:{found}\n" for name, found in entries.items())
        (folder / "entry_points.txt").write_text(f"[{methods.GROUP}]\n{points}")
        importlib.invalidate_caches()
        return module

    return write


def test_the_package_in_contributing_installs_both_of_its_files_and_names_its_class() -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    found = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    module, _, name = found["project"]["entry-points"][methods.GROUP]["fedspread"].partition(":")
    code = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    objective = re.search(r'objective, heads = "(\w+):', code)
    assert objective is not None
    assert found["tool"]["setuptools"]["py-modules"] == [module, objective[1]]
    assert f"class {name}(Method):" in code
    assert all(f"`{each}.py`, as a file of" in text for each in (module, objective[1]))


def test_an_installed_package_is_all_that_a_method_needs(install: Install) -> None:
    module = install(source(), spread="Mine")
    assert method("spread").title == "FedSpread"
    assert type(method("spread")).__module__ == module
    assert method("spread") is method("spread")
    assert "spread" in methods.METHODS
    assert list(methods.METHODS) == sorted([*METHODS, "spread"])
    assert len(methods.METHODS) == len(list(methods.METHODS))
    assert runs_on("fedproto") == (
        "fedproto",
        "fedcof",
        "ffc",
        "ffc-dp",
        "ncm",
        "ncm-dp",
        "spread",
    )  # since that one trains nothing
    with pytest.raises(MethodError, match="got spred, try one of spread"):
        method("spred")


def test_an_installed_package_is_not_loaded_before_it_is_asked_for(install: Install) -> None:
    module = install(source(), spread="Mine")
    assert method("fedproto")
    assert module not in sys.modules


def test_a_class_is_named_by_its_place(install: Install) -> None:
    module = install(source())
    assert "spread" not in methods.METHODS
    found = method(f"{module}:Mine")
    assert found.name == "spread"
    assert method("spread") is found is load_method(f"{module}:Mine")
    assert "spread" in list(methods.METHODS)
    assert load_method("protofleet.contract.methods.fedproto:FedProto") is method("fedproto")


BROKEN = {
    "it raises": ("raise RuntimeError('no such board')", "RuntimeError: no such board"),
    "it ends the process": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "it is no Python": ("class Mine(", "SyntaxError"),
    "it needs what is not there": ("import a_module_that_nobody_has", "ModuleNotFoundError"),
    "it has no such class": ("", "AttributeError"),
    "its class is none": ("Mine = 5", "a class over protofleet.contract.methods.Method, got int"),
    "its class is no method": ("class Mine: pass", "a class over protofleet.contract.methods.Method, got type"),
    "it is the base": (
        "from protofleet.contract.methods import Method as Mine",
        "a class over protofleet.contract.methods.Method, got",
    ),
    "it cannot be made": (source() + "    def __init__(self): 1 / 0", "ZeroDivisionError"),
    "it has another name": (source(name="'other'"), "expected a method of that name: spread, got other"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_named_where_it_is_asked_for_and_breaks_nothing_else(install: Install, name: str) -> None:
    text, words = BROKEN[name]
    module = install(text, spread="Mine")
    assert list(methods.METHODS) == list(METHODS)
    assert method("fedproto").name == "fedproto"
    with pytest.raises(MethodError, match="got unheard, try one of"):
        method("unheard")
    with pytest.raises(MethodError) as refused:
        method("spread")
    line = str(refused.value)
    assert words in line
    assert module in line or "other" in line
    assert "\n" not in line


def test_a_module_that_is_not_found_says_where_it_is_looked_for(install: Install) -> None:
    with pytest.raises(MethodError, match=r"No module named 'nowhere', try PYTHONPATH=FOLDER, where it lies"):
        load_method("nowhere:Mine")
    with pytest.raises(MethodError) as caught:  # what it needs itself is another matter
        load_method(f"{install('import a_module_that_nobody_has')}:Mine")
    assert "PYTHONPATH" not in str(caught.value)


@pytest.mark.parametrize("fact", COMPLETE)
def test_a_class_that_says_too_little_is_refused_and_told_what_is_missing(install: Install, fact: str) -> None:
    module = install(source(**{fact: None}))
    with pytest.raises(MethodError, match=f"method {module}:Mine, expected a class that says its {fact}, got none"):
        method(f"{module}:Mine")


@pytest.mark.parametrize("name", ["''", "'Spread'", "'a:b'", "'a/b'", "'a b'", f"'{'a' * 33}'"])
def test_a_name_that_no_message_or_command_could_carry_is_refused(install: Install, name: str) -> None:
    module = install(source(name=name))
    with pytest.raises(MethodError, match="expected a name of 1 to 32 of a-z, 0-9, - and _, got"):
        method(f"{module}:Mine")


@pytest.mark.parametrize("statistic", ["dict", "5", "Statistic"])
def test_what_a_method_sends_is_a_statistic_of_declared_fields(install: Install, statistic: str) -> None:
    module = install("from protofleet.contract.sums.statistics import Statistic\n" + source(statistic=statistic))
    with pytest.raises(
        MethodError, match=r"expected a statistic over protofleet.contract.sums.statistics.Statistic, got another"
    ):
        method(f"{module}:Mine")


def test_a_statistic_that_no_message_can_carry_is_complained_of_by_the_methods_name(install: Install) -> None:
    text = (
        "from protofleet.contract.sums.statistics import Statistic, Triangle\n"
        "class Alone(Statistic):\n    FIELDS = (Triangle('gram'),)\n"
    )
    module = install(text + source(statistic="Alone"), spread="Mine")
    assert "spread" not in list(methods.METHODS)
    with pytest.raises(MethodError, match=f"method {module}:Mine, .*StatisticError: Alone, expected one triangle"):
        method("spread")


def test_two_classes_of_one_name_are_refused_and_the_first_stays(install: Install) -> None:
    module, other = install(source()), install(source())
    ours = install(source(name="'fedproto'"))
    first = method(f"{module}:Mine")
    for path, there in (
        (f"{other}:Mine", f"{module}:Mine"),
        (f"{ours}:Mine", "protofleet.contract.methods.fedproto:FedProto"),
    ):
        with pytest.raises(MethodError, match=f"a name that no other method has, got {path}, {there}"):
            method(path)
    assert method("spread") is first
    assert type(method("fedproto")).__module__ == "protofleet.contract.methods.fedproto"


def test_two_packages_that_install_one_name_are_refused_where_it_is_asked_for(install: Install) -> None:
    names = sorted([install(source(), spread="Mine"), install(source(), spread="Mine")])
    assert "spread" not in list(methods.METHODS)
    with pytest.raises(MethodError, match=f"one package that has it, got {names[0]}:Mine, {names[1]}:Mine"):
        method("spread")


def test_a_package_cannot_take_the_place_of_a_method_of_ours(install: Install) -> None:
    module = install(source(name="'fedproto'"), fedproto="Mine")
    assert type(method("fedproto")).__module__ == "protofleet.contract.methods.fedproto"
    assert module not in sys.modules


@pytest.mark.parametrize(
    "path", [":", ":Mine", "os:", "os:path", "no_such_module:Mine", "protofleet.contract.methods.base:Method"]
)
def test_what_is_no_class_of_a_method_is_refused_in_one_line(registry: None, path: str) -> None:
    with pytest.raises(
        MethodError, match=r"expected package.module:Class, a class over protofleet.contract.methods.Method, got"
    ):
        method(path)
    assert list(methods.METHODS) == list(METHODS)


MISBEHAVED = {
    "raises": ("raise RuntimeError('no such thing')", "expected a result, got RuntimeError: no such thing"),
    "gives nothing": ("return None", "expected {}, got NoneType"),
    "raises without a word": ("raise ZeroDivisionError", "expected a result, got ZeroDivisionError"),
}


@pytest.mark.parametrize("broken", MISBEHAVED)
@pytest.mark.parametrize(
    "step", [("summarise", "local", "Statistic"), ("next_rows", "previous, merged, hyper", "dict")]
)
def test_what_a_strangers_method_raises_is_one_line_with_its_name(
    install: Install, broken: str, step: tuple[str, str, str]
) -> None:
    name, takes, kind = step
    body, line = MISBEHAVED[broken]
    module = install(source() + f"    def {name}(self, {takes}):\n        {body}\n")
    found = load_method(f"{module}:Mine")
    with pytest.raises(MethodError) as raised:
        getattr(found, name)(*takes.split(", "))
    assert str(raised.value).startswith(f"{name} of method {module}:Mine, {line.format(kind)}")


def test_what_protofleet_raises_on_purpose_goes_through_a_strangers_method(install: Install) -> None:
    text = "from protofleet.contract.errors import DivergedError\n" + source() + "    def summarise(self, local):\n"
    found = load_method(install(text + "        raise DivergedError('training diverged')\n") + ":Mine")
    with pytest.raises(DivergedError, match=r"^training diverged$"):
        found.summarise(None)
