"""Test part of the combinations of provider, task and command that docs/reference/matrix.md lists."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.matrix.commands import Cell, check_cells
from tests.matrix.models import PACKAGES, PROVIDERS, TASKS
from tests.matrix.page import PAGE, read_cells

EXPECTED = read_cells(PAGE)
QUICK = ["run", "--json", "batch", "batch --resume", "report"]
SLOW = {("torchvision", "keypoints"), ("torchvision", "detection")}  # scripts/check_matrix runs these.
SUPPORTED = [(provider, task) for provider, (_, tasks) in PROVIDERS.items() for task in tasks]
# By default, the first is explained by attention and the second by an embedding. Evaluation needs the method's layer.
EVALUATED = [("hf", "text"), ("timm", "likeness")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("provider", "task"), [pair for pair in SUPPORTED if pair not in SLOW] + [("timm", "likeness")]
)
def test_cells_are_those_of_the_page(tmp_path: Path, provider: str, task: str) -> None:
    if provider in PACKAGES and importlib.util.find_spec(PACKAGES[provider]) is None:
        pytest.skip(f"needs {PACKAGES[provider]}")
    commands = [*QUICK, *(["check", "evaluate"] if (provider, task) in EVALUATED else [])]
    commands += ["compare", "page", "check", "evaluate", "diff", "ui"] if provider == "FILE.py" else []
    cells = list(check_cells(provider, task, tmp_path, commands))
    assert [cell for cell in cells if not isinstance(cell, Cell)] == []
    assert cells == [EXPECTED[provider, task, command] for command in commands]


def test_every_combination_is_on_the_page() -> None:
    expected = {(provider, task) for provider in PROVIDERS for task in TASKS}
    assert {(provider, task) for provider, task, _ in EXPECTED} == expected
