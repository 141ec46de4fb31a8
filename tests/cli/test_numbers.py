"""Test that numbers out of range are refused in one line, before PyTorch is imported."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

import gradcam
from gradcam.cli import cli
from gradcam.errors import GradcamError

HUGE = ("1" + "0" * 30, "1e308", "inf")
# Options that this package parses itself, with values that they must refuse.
INVALID_VALUES = {
    "--mean": ("nan", "inf", "1e308", "x", "0.5,nan"),
    "--std": ("0", "-1", "nan", "inf", "1e308", "0.5,0"),
    "--size": ("0", "-1", "99999999999", "nan", "1e3"),
    "--missed": ("0,0,nan,5", "0,0,5", "0,0,1e308,5", "0,0,inf,5"),
    "--fit": ("tiles:0", "tiles:-1", "tiles:99999999999", "tiles:nan"),
    "--max-failures": ("-1", "1e308", "nan", "101%", "1" + "0" * 30),
    "--shard": ("0/1", "2/1", "1/99999999999", "1/x"),
    "--reshape": ("0x1", "99999999999x3", "nan"),
}


def list_options(group: Any = cli, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from list_options(command, (*words, name))
        else:
            yield from (((*words, name), parameter) for parameter in command.params)


def limits(option: Any) -> dict[str, Any]:
    """Return the limits of a number option: `minimum`, `maximum` and sometimes `above`."""
    return getattr(getattr(option.type, "_parse", None), "keywords", {})


# click's own number types have no finite limits, so the test below must find them.
NUMBERS = {
    (*words, option.opts[-1]): option
    for words, option in list_options()
    if {"minimum", "maximum"} <= limits(option).keys()
    or isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType))
}
INVALID_CASES = {
    (*words, option.opts[-1], value): option
    for words, option in list_options()
    for value in INVALID_VALUES.get(option.opts[-1], ())
}


def read(option: Any, value: str) -> Any:
    """Parse a value as the option does, including its callback."""
    context = click.Context(click.Command("x"))
    return option.process_value(context, (value,) if option.multiple else value)


def test_there_are_numbers_in_most_commands() -> None:
    assert len({words[:-1] for words in NUMBERS}) > 12
    assert set(INVALID_VALUES) <= {words[-2] for words in INVALID_CASES}


@pytest.mark.parametrize("words", NUMBERS, ids=" ".join)
def test_a_number_has_two_limits_and_keeps_within_them(words: tuple[str, ...]) -> None:
    option = NUMBERS[words]
    low, high, above = (limits(option).get(name) for name in ("minimum", "maximum", "above"))
    assert low is not None, "no lower limit"
    assert high is not None, "no upper limit"
    assert math.isfinite(high)
    below = low if above else low - 1
    for value in (str(below), str(high + 1), *HUGE, "nan", "abc", ""):
        with pytest.raises(click.UsageError) as refused:
            read(option, value)
        assert "\n" not in refused.value.format_message()
    if option.opts[-1] == "--max-pixels":
        return  # Setting it would change the limit of the test process.
    for value in (low, high):
        if value != low or not above:
            assert read(option, str(value)) == value


@pytest.mark.parametrize("words", INVALID_CASES, ids=" ".join)
def test_numbers_within_words_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises((click.UsageError, GradcamError)) as refused:
        read(INVALID_CASES[words], words[-1])
    assert "\n" not in str(refused.value)


RUN = """
import sys
from gradcam.cli import cli
try:
    cli.main(sys.argv[1:], prog_name="gradcam", standalone_mode=False)
except Exception as error:
    print(type(error).__name__, error)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "words", [("batch", "--workers", "99999999999"), ("run", "--std", "0"), ("check", "--seed", "nan")]
)
def test_pytorch_is_not_imported_for_a_number_that_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *option = words
    (tmp_path / "a.png").touch()
    line = [sys.executable, "-c", RUN, command, "a.png", *option]
    result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "False", result.stdout
    assert len(result.stdout.splitlines()) == 2


def test_python_refuses_as_many_threads(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(GradcamError, match="workers is 99999999999, expected a number of threads, from 1 to 1024"):
        list(gradcam.explain_files(tmp_path, gradcam.load_classifier(), workers=99999999999))
