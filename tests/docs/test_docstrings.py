"""Test that every public name documents its parameters, result and errors, and that its example runs as a doctest."""

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
PACKAGES = ("gradcam", "gradcam.attributions", "gradcam.evaluation", "gradcam.inspection", "gradcam.errors")
# Each table has a block on the page of the reference.
TABLES = ("METHODS", "attributions.ATTRIBUTIONS", "evaluation.CONTROLS", "evaluation.METRICS")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def find(name: str) -> Any:
    obj: Any = importlib.import_module("gradcam")
    for part in name.split("."):
        obj = getattr(obj, part) if hasattr(obj, part) else importlib.import_module(f"{obj.__name__}.{part}")
    return obj


def members(name: str) -> dict[str, Any]:
    """Return the public functions and properties of a class, with those inherited from gradcam's own classes."""
    bases = [base for base in find(name).__mro__ if base.__module__.startswith("gradcam")]
    attributes = {key: obj for base in reversed(bases) for key, obj in vars(base).items() if not key.startswith("_")}
    functions = {}
    for key, obj in attributes.items():
        function = getattr(obj, "fget", None) or getattr(obj, "func", None) or getattr(obj, "__func__", obj)
        if inspect.isfunction(function) and key not in getattr(find(name), "__dataclass_fields__", ()):
            functions[f"{name}.{key}"] = obj
    return functions


CLASSES = [name for name in NAMES if inspect.isclass(find(name))]
FUNCTIONS = [name for name in NAMES if name not in CLASSES]
MEMBERS = {key: obj for name in CLASSES for key, obj in members(name).items()}


def get_function(obj: Any) -> Any:
    return getattr(obj, "fget", None) or getattr(obj, "func", None) or getattr(obj, "__func__", obj)


def read(obj: Any) -> FunctionDoc:
    return FunctionDoc(None, doc=inspect.getdoc(obj) or "")


def documented(doc: FunctionDoc, *sections: str) -> list[str]:
    """Return the documented parameters or fields. Each must have a type and a description."""
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
    names = documented(doc, "Parameters", "Other Parameters")
    expected = parameters(function)
    if takes_options(function):
        names = [name for name in names if name not in typing.get_type_hints(ExplainOptions)]
        names = names if "options" in names else [*names, "options"]
    assert names == expected


def returns_value(function: Any) -> bool:
    return str(getattr(function, "__annotations__", {}).get("return")) not in ("None", "NoReturn")


def raises(function: Any) -> bool:
    return bool(re.search(r"^\s+raise ", inspect.getsource(function), re.M))


def check_function(obj: Any) -> None:
    function, doc = get_function(obj), read(obj)
    summary = " ".join(doc["Summary"])
    assert summary.endswith((".", ":"))
    if function is not obj and not isinstance(obj, (classmethod, staticmethod)):
        return  # a property needs only its summary
    assert not summary.split()[0].endswith("s")  # imperative: "Return", not "Returns"
    check_parameters(function, doc)
    if returns_value(function):
        assert doc["Returns"] or doc["Yields"], "no section Returns"
    if raises(function):
        assert doc["Raises"], "no section Raises"
    for item in doc["Raises"]:
        assert " ".join(item.desc).strip(), f"does not say when it raises {item.type}"


def is_small(function: Any) -> bool:
    """Return True if the function takes at most one value and raises nothing itself, so that one sentence is enough."""
    return len(parameters(function)) < 2 and not raises(function)


def test_the_reference_lists_every_public_name() -> None:
    expected = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        prefix = package.removeprefix("gradcam").lstrip(".")
        names = getattr(module, "__all__", None) or [
            key for key, obj in vars(module).items() if inspect.isclass(obj) and issubclass(obj, (Exception, Warning))
        ]
        expected |= {f"{prefix}.{name}".lstrip(".") for name in names if not inspect.ismodule(getattr(module, name))}
    expected -= {"__version__", "errors.GradcamError", "errors.GradcamWarning"}
    assert expected <= {*NAMES, *TABLES}
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_its_sections(name: str) -> None:
    obj = find(name)
    check_function(obj)
    assert read(obj)["Raises"]
    assert read(obj)["Examples"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_its_sections(name: str) -> None:
    cls = find(name)
    doc = read(cls)
    assert doc["Examples"]
    if is_dataclass(cls):
        public = [base for base in cls.__bases__ if base.__name__ in {name.rpartition(".")[2] for name in NAMES}]
        inherited = {field.name for base in public for field in fields(base)}
        public_fields = [
            field.name for field in fields(cls) if not field.name.startswith("_") and field.name not in inherited
        ]
        assert set(public_fields) <= set(documented(doc, "Parameters", "Attributes"))
    elif "__init__" in vars(cls):
        check_parameters(cls.__init__, doc)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_method_has_its_sections(name: str) -> None:
    obj = MEMBERS[name]
    if is_small(get_function(obj)):
        assert " ".join(read(obj)["Summary"]).endswith((".", ":"))
    else:
        check_function(obj)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_labelled(tmp_path_factory.mktemp("labelled"))


@pytest.fixture
def workspace(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of images the current folder, for the examples."""
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


@pytest.mark.parametrize("name", [*NAMES, *(name for name, obj in MEMBERS.items() if read(obj)["Examples"])])
def test_the_example_runs(name: str, workspace: Path) -> None:
    obj = MEMBERS.get(name) or find(name)
    doc = inspect.getdoc(obj) or ""
    examples = doctest.DocTestParser().get_doctest(doc, {}, name, None, None)
    assert examples.examples, "no example"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=OPTIONS).run(examples, out=printed.append, clear_globs=False)
    assert not printed, "".join(printed)
    is_made = inspect.isclass(obj) and any(isinstance(value, obj) for value in examples.globs.values())
    assert is_made or name.rpartition(".")[2] in doc.partition("Examples\n")[2], "the example does not show it"
