"""Test a few runs that are killed, or whose results are truncated or changed; two scripts in this folder test more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are forked, and signals are others elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["mutated_runs --count 12", "killed_runs --kills 40 --pictures 12", "interrupted_runs --count 20"]
)
def test_a_run_is_resumed_rightly_or_refused_clearly(command: str) -> None:
    name, *options = command.split()
    arguments, folder = [sys.executable, "-m", f"tests.{name}", *options], Path(__file__).parents[2]
    result = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
