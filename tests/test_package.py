"""What holds for the package as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gradcam

ROOT = Path(__file__).parent.parent


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_no_torch() -> None:
    assert python("import sys, gradcam; print(sorted({'torch', 'numpy', 'cv2', 'PIL'} & set(sys.modules)))") == "[]\n"


@pytest.mark.parametrize("name", sorted(set(gradcam.__all__) - {"__version__"}))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert name in dir(gradcam)
    value = getattr(gradcam, name)
    assert value is getattr(gradcam, name)
    assert name == "METHODS" or value.__doc__


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="gradcam attribute nothing"):
        _ = gradcam.nothing


def test_no_public_name_is_overwritten_by_a_module() -> None:
    import importlib

    for path in (ROOT / "gradcam").iterdir():
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
            importlib.import_module(f"gradcam.{path.stem}")
    assert callable(gradcam.overlay)
    assert callable(gradcam.explain)


def test_the_version_is_said() -> None:
    command = [sys.executable, "-m", "gradcam", "--version"]
    assert gradcam.__version__ in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"## [{gradcam.__version__}] - 20" in (ROOT / "CHANGELOG.md").read_text()
