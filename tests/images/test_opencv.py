"""Test a missing or damaged OpenCV, and its other distributions."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from gradcam.errors import GradcamError
from tests.cli.test_cli import POSIX
from tests.docs.pages import read_blocks

ROOT = Path(__file__).parent.parent.parent
OTHERS = ("opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
NO_LIBRARY = ImportError("libGL.so.1: cannot open shared object file: No such file or directory")
NO_MODULE = ModuleNotFoundError("No module named 'cv2'")
MIXTURE = AttributeError("module 'cv2.dnn' has no attribute 'DictValue'")


class Cv2Finder:
    """A module finder that raises an error for cv2, or returns an empty package."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != "cv2":
            return None
        if self.error is not None:
            raise self.error
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception | None, installed: Sequence[str]) -> str:
    """Return the message if importing cv2 raises this error and these distributions are installed."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "5.0.0"

    for name in ("cv2", "gradcam.images.opencv"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # Let monkeypatch remove the fake module at the end.
        del sys.modules[name]
    monkeypatch.setattr(sys, "meta_path", [Cv2Finder(error), *sys.meta_path])
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(GradcamError) as caught:
        importlib.import_module("gradcam.images.opencv")
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "installed", "message"),
    [
        (NO_MODULE, [], f"({NO_MODULE}). Install it: pip install opencv-python"),
        (
            NO_MODULE,
            ["opencv-contrib-python"],
            f"({NO_MODULE}). The files of OpenCV are damaged or missing, install OpenCV again: "
            "pip uninstall --yes opencv-contrib-python && pip install opencv-contrib-python",
        ),
        (
            None,
            ["opencv-python-headless"],
            "(the folder of cv2 has no binary). The files of OpenCV are damaged or missing, install OpenCV again: "
            "pip uninstall --yes opencv-python-headless && pip install opencv-python-headless",
        ),
        (
            MIXTURE,
            ["opencv-python", "opencv-contrib-python"],
            f"({MIXTURE}). opencv-contrib-python and opencv-python overwrite each other's files, keep one of them: "
            "pip uninstall --yes opencv-contrib-python opencv-python && pip install opencv-contrib-python",
        ),
        (
            NO_LIBRARY,
            ["opencv-python"],
            f"({NO_LIBRARY}). Without a display, use the headless build: "
            "pip uninstall --yes opencv-python && pip install opencv-python-headless",
        ),
        (
            NO_LIBRARY,
            ["opencv-python", "opencv-contrib-python-headless"],
            f"({NO_LIBRARY}). Without a display, use the headless build: pip uninstall --yes "
            "opencv-contrib-python-headless opencv-python && pip install opencv-contrib-python-headless",
        ),
    ],
)
def test_the_message_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, installed: Sequence[str], message: str
) -> None:
    assert refuse(monkeypatch, error, installed) == f"OpenCV cannot be loaded {message}"


# Real distributions, in separate virtual environments


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the Python of an environment with all installed packages except OpenCV and gradcam."""
    packages, venv = tmp_path / "packages", tmp_path / "venv"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"cv2|opencv|gradcam|_editable|__editable__|pip\b", entry.name):
            (packages / entry.name).symlink_to(entry)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    site, scripts = (
        Path(sysconfig.get_path(name, vars={"base": str(venv), "platbase": str(venv)}))
        for name in ("purelib", "scripts")
    )
    (site / "packages.pth").write_text(str(packages))
    return scripts / Path(sys.executable).name


def run(python: Path, line: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command line in the environment, with its `pip`, `python` and `gradcam`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_COMPILE"] = "0"  # Compiling every file takes longer than the test itself.
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    command = ["bash", "-c", line, "bash", *map(str, arguments)]
    return subprocess.run(command, cwd=python.parent, env=environment, capture_output=True, text=True, check=False)


DRAW = """
import numpy as np, gradcam
print(gradcam.overlay(np.zeros((8, 8, 3), np.uint8), np.eye(8, dtype=np.float32)).shape)
"""


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_distribution_is_installed_first(python: Path, name: str) -> None:
    if run(python, 'pip install --quiet "$1"', name).returncode:
        pytest.skip("the package index cannot be reached")
    result = run(python, 'pip install --quiet --no-build-isolation "$1"', ROOT)
    assert result.returncode == 0, result.stderr
    assert run(python, 'python -c "import cv2; cv2.imdecode"').returncode == 0
    assert run(python, 'python -c "$1"', DRAW).stdout == "(8, 8, 3)\n"

    assert run(python, "pip uninstall --quiet --yes opencv-python").returncode == 0
    result = run(python, 'gradcam run "$1"', ROOT / "assets" / "coffee.jpg")
    match = re.fullmatch(r"Error: OpenCV cannot be loaded \(.+\)\. .+: (pip .+)\n", result.stderr)
    assert match, result.stderr
    assert result.returncode == 2
    assert match[1] == f"pip uninstall --yes {name} && pip install {name}"
    error = run(python, 'python -c "$1"', DRAW).stderr.splitlines()[-1]
    assert error == f"gradcam.errors.Gradcam{result.stderr.rstrip()}"

    assert run(python, match[1]).returncode == 0
    assert run(python, 'python -c "$1"', DRAW).stdout == "(8, 8, 3)\n"


CONTRIB = 'python -c "import cv2; cv2.ximgproc.createSuperpixelSLIC"'


@POSIX
@pytest.mark.slow
def test_the_page_restores_the_distribution_that_was_there(python: Path) -> None:
    if run(python, "pip install --quiet opencv-contrib-python").returncode:
        pytest.skip("the package index cannot be reached")
    assert run(python, CONTRIB).returncode == 0
    assert run(python, "pip install --quiet opencv-python").returncode == 0
    assert run(python, CONTRIB).returncode == 1
    (block,) = (block for block in read_blocks(ROOT / "docs/start/install.md") if block.mark == "elsewhere")
    assert run(python, block.code).returncode == 0
    assert run(python, CONTRIB).returncode == 0
