"""Test old public names: each works like the new name and warns; records have both keys."""

import copy
import importlib
import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradcam
from gradcam.renames import REMOVED_IN, RENAMES, OldKeys, Rename, add_new_keys, add_old_keys, to_new_value
from tests.cli.test_cli import Command, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

ROOT = Path(__file__).parent.parent
MESSAGE = f"removed in gradcam {re.escape(REMOVED_IN)}"


def rows(kind: str) -> Any:
    renames = [row for row in RENAMES if row.kind == kind]
    assert renames
    return pytest.mark.parametrize("row", renames, ids=[f"{row.owner}.{row.old}" for row in renames])


def find(path: str) -> Any:
    """Import the longest part of a dotted name that is a module, and look up the rest."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            actual = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            actual = getattr(actual, part)
        return actual
    raise AssertionError(path)


def test_no_row_is_there_twice_or_leads_to_an_old_name() -> None:
    names = [(row.kind, row.owner, row.old) for row in RENAMES]
    assert len(set(names)) == len(names)
    assert not {(row.kind, row.owner, row.new) for row in RENAMES} & set(names)


@rows("name")
def test_an_old_name_of_a_module_is_the_new_object(row: Rename) -> None:
    module = importlib.import_module(row.owner)
    with pytest.warns(FutureWarning, match=f"{row.old} is now {row.new}.*{MESSAGE}") as warned:
        actual = getattr(module, row.old)
    assert actual is getattr(module, row.new)
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match="nothing_like_this"):
        module.nothing_like_this  # noqa: B018


@rows("parameter")
def test_an_old_parameter_is_passed_on_as_the_new_one(row: Rename) -> None:
    function = find(row.owner)
    signature = inspect.signature(function)
    assert row.new in signature.parameters
    assert row.old not in signature.parameters
    required = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD and name != row.new
    ]
    # The function refuses this value itself, or something that it calls does; both names must fail alike.
    refused = object()
    required_arguments = dict.fromkeys(required, refused)
    with pytest.raises(Exception) as expected:  # noqa: PT011  (any, as long as it is the same)
        call(function, required_arguments | {row.new: refused})
    warns = pytest.warns(FutureWarning, match=rf"{row.old}=\.\.\.\) is now {row.new}=.*{MESSAGE}")
    with warns as warned, pytest.raises(type(expected.value)) as actual:
        call(function, required_arguments | {row.old: refused})
    assert str(actual.value) == str(expected.value)
    assert warned[0].filename == __file__
    with pytest.raises(TypeError, match=f"both {row.new}= and its old name {row.old}="):
        call(function, required_arguments | {row.old: refused, row.new: refused})


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    result = function(**arguments)
    if hasattr(result, "__enter__"):
        with result:
            pass


@rows("attribute")
def test_an_old_attribute_is_the_new_one(row: Rename) -> None:
    kind = find(row.owner)
    fields = {"__annotations__": {}, row.new: "its value"}
    if isinstance(inspect.getattr_static(kind, row.new, None), property):
        fields[row.new] = property(lambda _: "its value")
    instance = object.__new__(type(kind.__name__, (kind,), fields))
    assert getattr(instance, row.new) == "its value"
    with pytest.warns(FutureWarning, match=f"{kind.__name__}.{row.old} is now {row.new}.*{MESSAGE}") as warned:
        actual = getattr(instance, row.old)
    assert actual == "its value"
    assert warned[0].filename == __file__


@rows("attribute")
def test_a_new_attribute_exists(row: Rename) -> None:
    kind = find(row.owner)
    annotated = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    assert row.new in annotated or hasattr(kind, row.new)
    assert row.old not in annotated


@rows("key")
def test_an_old_key_is_beside_the_new_one_and_is_read(row: Rename) -> None:
    record = {row.new: ["its value"], "else": 1}
    before = copy.deepcopy(record)
    assert add_old_keys(row.owner, record) == {**record, row.old: ["its value"]}
    assert record == before
    assert add_new_keys(row.owner, {row.old: 3, "else": 1}) == {row.old: 3, row.new: 3, "else": 1}
    assert add_new_keys(row.owner, {row.old: 3, row.new: 4}) == {row.old: 3, row.new: 4}
    drawn = OldKeys(row.owner, record)
    assert drawn == record
    with pytest.warns(FutureWarning, match=MESSAGE):
        assert drawn[row.old] == ["its value"]
    with pytest.raises(KeyError, match="nothing"):
        drawn["nothing"]


def test_below_an_old_key_everything_is_as_it_was() -> None:
    record = {"controls": [{"name": "another image", "is_distinguished": True}], "outcome": "passed"}
    assert add_old_keys("gradcam check --json", record) == {
        "controls": [{"name": "another image", "is_distinguished": True}],
        "shams": [{"name": "another picture", "is_apart": True}],
        "outcome": "passed",
    }


@rows("value")
def test_an_old_value_is_read_as_the_new_one(row: Rename) -> None:
    assert to_new_value(row.owner, row.old) == to_new_value(row.owner, row.new) == row.new
    assert to_new_value(row.owner, "another one") == "another one"


@rows("option")
def test_an_old_option_does_what_the_new_one_does(row: Rename, gradcam_command: Command) -> None:
    command = row.owner.split()[1:]
    before, after = gradcam_command(*command, row.old, "0.5", "."), gradcam_command(*command, row.new, "0.5", ".")
    note = f"{row.old} is now {row.new}. The old name will be removed in gradcam {row.removed_in}.\n"
    assert before.err == note + after.err
    assert (before.out, before.status) == (after.out, after.status)
    wrong = gradcam_command(*command, row.old, "2")
    assert (wrong.status, f"'{row.old}'" in wrong.err) == (2, True)


def test_the_migration_page_is_made_from_the_table() -> None:
    write = runpy.run_path(str(ROOT / "scripts" / "write_renames"))
    page = (ROOT / "docs" / "reference" / "renames.md").read_text(encoding="utf-8")
    assert page == write["format_page"]()
    for row in RENAMES:
        assert f"| `{row.old}` | `{row.new}` | {row.removed_in} |" in page


def test_no_old_name_outlives_its_version() -> None:
    version = tuple(map(int, gradcam.__version__.split(".")[:2]))
    assert all(version < tuple(map(int, row.removed_in.split("."))) for row in RENAMES)
