"""Test that every public name documents its parameters, result and errors, and that its example runs as a doctest."""

import doctest
import importlib
import inspect
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from numpydoc.docscrape import FunctionDoc
from numpydoc.validate import validate

from tests.docs.labelled import make_labelled
from tests.docs.pages import ROOT

REFERENCE = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^   ([\w.]+)$", REFERENCE, re.M)
PACKAGES = (
    "gradcam",
    "gradcam.attributions",
    "gradcam.evaluation",
    "gradcam.inspection",
    "gradcam.integrations",
    "gradcam.errors",
)
# Each table has a block on the page of the reference.
TABLES = ("METHODS", "attributions.ATTRIBUTIONS", "evaluation.CONTROLS", "evaluation.METRICS")
# The summary; each parameter in its order, with a type and a description; the result: see numpydoc.validate.
CODES = {"SS01", "SS05", "PR01", "PR02", "PR03", "PR04", "PR07", "RT01", "RT03"}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def find(name: str) -> Any:
    obj: Any = importlib.import_module("gradcam")
    for part in name.split("."):
        obj = getattr(obj, part) if hasattr(obj, part) else importlib.import_module(f"{obj.__name__}.{part}")
    return obj


def get_function(obj: Any) -> Any:
    return getattr(obj, "fget", None) or getattr(obj, "func", None) or getattr(obj, "__func__", obj)


def members(name: str) -> dict[str, Any]:
    """Return the public functions and properties of a class, with those inherited from gradcam's own classes."""
    bases = [base for base in find(name).__mro__ if base.__module__.startswith("gradcam")]
    attributes = {key: obj for base in reversed(bases) for key, obj in vars(base).items() if not key.startswith("_")}
    functions = {}
    for key, obj in attributes.items():
        if inspect.isfunction(get_function(obj)) and key not in getattr(find(name), "__dataclass_fields__", ()):
            functions[f"{name}.{key}"] = obj
    return functions


CLASSES = [name for name in NAMES if inspect.isclass(find(name))]
FUNCTIONS = [name for name in NAMES if name not in CLASSES]
MEMBERS = {key: obj for name in CLASSES for key, obj in members(name).items()}


def read(obj: Any) -> FunctionDoc:
    return FunctionDoc(None, doc=inspect.getdoc(obj) or "")


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


@pytest.mark.parametrize("name", [*NAMES, *MEMBERS])
def test_the_docstring_has_its_sections(name: str) -> None:
    obj = MEMBERS.get(name) or find(name)
    doc, function = read(obj), get_function(obj)
    assert " ".join(doc["Summary"]).endswith((".", ":"))
    assert doc["Examples"] or name in MEMBERS
    if is_dataclass(obj):
        public = [base for base in obj.__bases__ if base.__name__ in {name.rpartition(".")[2] for name in NAMES}]
        inherited = {field.name for base in public for field in fields(base)}
        entries = [
            entry for entry in doc["Parameters"] + doc["Attributes"] if entry.type and "".join(entry.desc).strip()
        ]
        documented = {part for entry in entries for part in entry.name.split(", ")}
        assert {field.name for field in fields(obj) if not field.name.startswith("_")} <= documented | inherited
        return
    raises = bool(inspect.isfunction(function) and re.search(r"^\s+raise ", inspect.getsource(function), re.M))
    takes_one = name in MEMBERS and len(inspect.signature(function).parameters) < 3
    if isinstance(obj, property) or (takes_one and not raises):
        return  # one sentence is enough for a property, or a method that takes at most one value and raises nothing
    assert list_faults(name, CODES - {"RT01"} if doc["Yields"] else CODES) == []
    assert doc["Raises"] or not (raises or name in FUNCTIONS)
    assert all("".join(item.desc).strip() for item in doc["Raises"])


def list_faults(name: str, codes: set[str]) -> list[str]:
    """List the faults that numpydoc finds. Only `explain` itself describes the options that other functions pass on."""
    faults = [message for code, message in validate(f"gradcam.{name}")["errors"] if code in codes]
    return [item for item in faults if "{'**options'} not" not in item and (name, item[:7]) != ("explain", "Unknown")]


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
