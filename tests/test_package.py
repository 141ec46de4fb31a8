"""What holds for the package as a whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gradcam

ROOT = Path(__file__).parent.parent
ROOMS = {  # design: imports point downwards only; each room may import those of a lower number
    "errors": 0,
    "naming": 1, "files": 1, "records": 1, "scores": 1, "choices": 1, "methods": 2, "devices": 1, "nested": 1, "opencv": 1,
    "indices": 1,
    "failures": 1, "exchange": 0, "passages": 0.5, "hooks": 1, "grad_mode": 1, "buffers": 1, "evidence": 3, "memory": 2,
    "depth": 1, "images": 2, "dicom": 3, "heatmap": 2, "patches": 1, "tokens": 2, "gradients": 2, "reshaping": 3,
    "drawing": 3, "layers": 3, "dependence": 3, "target_layer": 3, "targets": 3, "quantised": 2, "inputs": 2,
    "isolation": 2.5, "mixing": 3, "arguments": 3, "arrays": 3, "axes": 3.5, "recording": 4, "places": 4.5, "panels": 4,
    "rounding": 5, "signs": 3, "suggestion": 5.5, "sites": 5, "listing": 6, "effort": 5, "augmentation": 5,
    "levels": 6, "perturbation": 6, "inspection": 6,
    "attention": 7,
    "maps": 8,
    "explanation": 9,
    "fusion": 10, "attributions": 10,
    "classifiers": 11,
    "stores": 1, "hashing": 2,
    "batch": 12,
    "evaluation": 13, "report": 13,
    "cli": 14,
}  # fmt: skip


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
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gradcam.nothing


def test_no_public_name_is_overwritten_by_a_module() -> None:
    import importlib

    for path in (ROOT / "gradcam").iterdir():
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
            importlib.import_module(f"gradcam.{path.stem}")
    assert callable(gradcam.overlay)
    assert callable(gradcam.explain)


def test_imports_point_downwards() -> None:
    import ast

    for path in (ROOT / "gradcam").rglob("*.py"):
        room = path.relative_to(ROOT / "gradcam").parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Import) and any(alias.name.startswith("gradcam") for alias in node.names))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradcam"):
                names = [node.module] if node.module != "gradcam" else [f"gradcam.{alias.name}" for alias in node.names]
                for name in names:
                    other = str(name).split(".")[1]
                    if other not in ("__version__", room):
                        assert ROOMS[other] < ROOMS[room], f"{path.name} imports {name}"


def test_the_version_is_said() -> None:
    command = [sys.executable, "-m", "gradcam", "--version"]
    assert gradcam.__version__ in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"## {gradcam.__version__}" in (ROOT / "CHANGELOG.md").read_text()
