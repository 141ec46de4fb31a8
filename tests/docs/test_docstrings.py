"""Every public name says what it takes, gives and raises, and shows an example; the example runs as a doctest."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import shutil
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from numpydoc.docscrape import FunctionDoc

from gradcam.options import ExplainOptions
from tests.docs.conftest import make_labelled
from tests.docs.pages import ROOT

REFERENCE = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^   ([\w.]+)$", REFERENCE, re.M)
ROOMS = ("gradcam", "gradcam.attributions", "gradcam.evaluation", "gradcam.inspection", "gradcam.errors")
TABLES = (
    "METHODS",
    "attributions.ATTRIBUTIONS",
    "evaluation.CONTROLS",
    "evaluation.METRICS",
)  # a block of the page each
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def find(name: str) -> Any:
    actual: Any = importlib.import_module("gradcam")
    for part in name.split("."):
        actual = (
            getattr(actual, part) if hasattr(actual, part) else importlib.import_module(f"{actual.__name__}.{part}")
        )
    return actual


def members(name: str) -> dict[str, Any]:
    """The public functions and properties of a class, those that it inherits from gradcam's own included."""
    of = [item for item in find(name).__mro__ if item.__module__.startswith("gradcam")]
    own = {key: it for item in reversed(of) for key, it in vars(item).items() if not key.startswith("_")}
    results = {}
    for key, it in own.items():
        function = getattr(it, "fget", None) or getattr(it, "func", None) or getattr(it, "__func__", it)
        if inspect.isfunction(function) and key not in getattr(find(name), "__dataclass_fields__", ()):
            results[f"{name}.{key}"] = it
    return results


CLASSES = [name for name in NAMES if inspect.isclass(find(name))]
FUNCTIONS = [name for name in NAMES if name not in CLASSES]
MEMBERS = {key: it for name in CLASSES for key, it in members(name).items()}


def function_of(it: Any) -> Any:
    return getattr(it, "fget", None) or getattr(it, "func", None) or getattr(it, "__func__", it)


def read(it: Any) -> FunctionDoc:
    return FunctionDoc(None, doc=inspect.getdoc(it) or "")


def documented(doc: FunctionDoc, *sections: str) -> list[str]:
    """The names of the parameters, or fields, which have a type and a description; others are wrong."""
    names = []
    for entry in (item for section in sections for item in doc[section]):
        assert entry.name, "a parameter without a name"
        assert entry.type, f"{entry.name} has no type"
        assert " ".join(entry.desc).strip(), f"{entry.name} has no description"
        names += [name.strip("* ") for name in entry.name.split(",")]
    return names


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def takes_options(function: Any) -> bool:
    return "ExplainOptions" in str(getattr(function, "__annotations__", {}).get("options", ""))


def check_parameters(function: Any, doc: FunctionDoc) -> None:
    message = documented(doc, "Parameters", "Other Parameters")
    expected = parameters(function)
    if takes_options(function):
        message = [name for name in message if name not in typing.get_type_hints(ExplainOptions)]
        message = message if "options" in message else [*message, "options"]
    assert message == expected


def gives(function: Any) -> bool:
    return str(getattr(function, "__annotations__", {}).get("return")) not in ("None", "NoReturn")


def raises(function: Any) -> bool:
    return bool(re.search(r"^\s+raise ", inspect.getsource(function), re.M))


def check_function(it: Any) -> None:
    function, doc = function_of(it), read(it)
    summary = " ".join(doc["Summary"])
    assert summary.endswith((".", ":"))
    if function is not it and not isinstance(it, (classmethod, staticmethod)):
        return  # a property says it all in a sentence or two
    assert not summary.split()[0].endswith("s")  # imperative: "Return", not "Returns"
    check_parameters(function, doc)
    if gives(function):
        assert doc["Returns"] or doc["Yields"], "no section Returns"
    if raises(function):
        assert doc["Raises"], "no section Raises"
    for item in doc["Raises"]:
        assert " ".join(item.desc).strip(), f"does not say when it raises {item.type}"


def is_small(function: Any) -> bool:
    """What takes one value at most, and raises nothing itself, says it in a sentence."""
    return len(parameters(function)) < 2 and not raises(function)


def test_the_reference_lists_every_public_name() -> None:
    expected = set()
    for room in ROOMS:
        module = importlib.import_module(room)
        of = room.removeprefix("gradcam").lstrip(".")
        names = getattr(module, "__all__", None) or [
            key for key, it in vars(module).items() if inspect.isclass(it) and issubclass(it, (Exception, Warning))
        ]
        expected |= {f"{of}.{name}".lstrip(".") for name in names if not inspect.ismodule(getattr(module, name))}
    expected -= {"__version__", "errors.GradcamError", "errors.GradcamWarning"}
    assert expected <= {*NAMES, *TABLES}
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_its_sections(name: str) -> None:
    it = find(name)
    check_function(it)
    assert read(it)["Raises"]
    assert read(it)["Examples"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_its_sections(name: str) -> None:
    cls = find(name)
    doc = read(cls)
    assert doc["Examples"]
    if is_dataclass(cls):
        public = [base for base in cls.__bases__ if base.__name__ in {name.rpartition(".")[2] for name in NAMES}]
        inherited = {field.name for base in public for field in fields(base)}
        own = [field.name for field in fields(cls) if not field.name.startswith("_") and field.name not in inherited]
        assert set(own) <= set(documented(doc, "Parameters", "Attributes"))
    elif "__init__" in vars(cls):
        check_parameters(cls.__init__, doc)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_method_has_its_sections(name: str) -> None:
    it = MEMBERS[name]
    if is_small(function_of(it)):
        assert " ".join(read(it)["Summary"]).endswith((".", ":"))
    else:
        check_function(it)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_labelled(tmp_path_factory.mktemp("labelled"))


@pytest.fixture
def desk(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the examples run: a folder of pictures."""
    (tmp_path / "labelled").symlink_to(labelled)
    for target, name in {
        "photo.jpg": "cat_and_espresso.jpg",
        "other.png": "camera.png",
        "photos/coffee.jpg": "coffee.jpg",
        "photos/rocket.jpg": "rocket.jpg",
    }.items():
        (tmp_path / target).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "assets" / name, tmp_path / target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [*NAMES, *(name for name, it in MEMBERS.items() if read(it)["Examples"])])
def test_the_example_runs(name: str, desk: Path) -> None:
    it = MEMBERS.get(name) or find(name)
    doc = inspect.getdoc(it) or ""
    examples = doctest.DocTestParser().get_doctest(doc, {}, name, None, None)
    assert examples.examples, "no example"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=OPTIONS).run(examples, out=printed.append, clear_globs=False)
    assert not printed, "".join(printed)
    is_made = inspect.isclass(it) and any(isinstance(value, it) for value in examples.globs.values())
    assert is_made or name.rpartition(".")[2] in doc.partition("Examples\n")[2], "the example does not show it"
