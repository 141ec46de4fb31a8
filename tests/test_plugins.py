"""Test the example plug-in of CONTRIBUTING.md, installed into a separate virtual environment."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gradcam
from gradcam import plugins

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^`([\w.]+)`:\n+```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


def read_package() -> dict[str, str]:
    """Return the files of the package by name, as CONTRIBUTING.md prints them."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## A package of your own")[2]
    return dict(BLOCK.findall(section))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a virtual environment with this environment's packages and gradcam."""
    folder = tmp_path_factory.mktemp("own")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    bin_folder = "Scripts" if sys.platform == "win32" else "bin"
    python = folder / "venv" / bin_folder / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    shared = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(gradcam.__file__).parents[1])]
    Path(site, "shared.pth").write_text("\n".join(dict.fromkeys(shared)))
    for name, text in read_package().items():
        (folder / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--no-deps", folder], check=True)
    return python


def run(python: Path, folder: Path, *arguments: object, status: int = 0) -> str:
    words = [python, "-m", "gradcam", *map(str, arguments)]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == status, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
def test_it_adds_a_method_a_metric_a_format_and_a_command(python: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name in ("cat_and_espresso.jpg", "coffee.jpg"):
        (photos / name).write_bytes((ROOT / "assets" / name).read_bytes())
    assert len([line for line in read_package()["mine.py"].splitlines() if line]) <= 20

    run(python, tmp_path, "run", photos / "coffee.jpg", "--method", "mycam", "--method", "layercam")
    mycam, layercam = (tmp_path / f"coffee-{method}.png" for method in ("mycam", "layercam"))
    assert mycam.read_bytes() == layercam.read_bytes()

    run(python, tmp_path, "evaluate", photos, "--methods", "gradcam,mycam", "--metrics", "brightness", "-o", "study")
    assert "brightness" in (tmp_path / "study" / "results.json").read_text()

    run(python, tmp_path, "batch", photos, "-o", "out", "--method", "mycam", "--output-format", "names")
    parts = (tmp_path / "out" / "names.txt").read_text().split()
    assert parts == ["cat_and_espresso-mycam.jpg", "coffee-mycam.jpg"]
    records = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert [record["explained"][0]["method"] for record in records] == ["mycam", "mycam"]
    more = ["--method", "mycam", "--output-format", "names"]
    run(python, tmp_path, "batch", photos, "-o", "out", *more, "--resume")
    assert (tmp_path / "out" / "names.txt").read_text().split() == parts, "there was nothing left to do"

    assert run(python, tmp_path, "hello") == "hello\n"
    assert "hello" in run(python, tmp_path, "--help").partition("Commands of other packages")[2]
    assert "mycam" in run(python, tmp_path, "run", "--help")
    assert "activations times positive gradients" in run(python, tmp_path, "methods")


@pytest.mark.slow
def test_one_that_is_broken_stops_no_other(python: Path, tmp_path: Path) -> None:
    result = run(python, tmp_path, "run", ROOT / "assets" / "coffee.jpg", "--method", "broken", status=2)
    assert ": broken (nowhere:cam of the package gradcam-mine) cannot be imported: Mod" in result
    assert "wrote" not in result
    run(python, tmp_path, "run", ROOT / "assets" / "coffee.jpg")
    run(python, tmp_path, "methods")


def test_a_changed_file_of_the_same_size_and_second_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, actual = tmp_path / "mine.py", []
    for number in (1, 2):
        file.write_text(f"def number():\n    return {number}\n")
        os.utime(file, (1e9, 1e9))
        actual.append(plugins.load_plugin("targets", f"{file}:number")())
    assert actual == [1, 2]
    assert not (tmp_path / "__pycache__").exists()  # Nothing is written beside the user's file.


def test_a_users_file_runs_as_any_module(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text("HERE = __file__\n\n\ndef score(output: int) -> float:\n    return output\n")
    # The package's own `from __future__ import annotations` must not apply.
    assert plugins.load_plugin("targets", f"{file}:score").__annotations__ == {"output": int, "return": float}
    assert plugins.load_plugin("targets", f"{file}:HERE") == str(file)
