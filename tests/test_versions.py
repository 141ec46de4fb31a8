"""Test the supported versions: the page matches pyproject.toml, and scripts/check_versions reports failures."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "check_versions"
DEVELOPMENT = {"test", "test-all", "docs", "lint", "bench"}  # extras that the page does not list
# Fake uv and pytest: uv makes environments with the current packages, and logs its arguments.
UV = """#!{python}
import pathlib, sys, venv
folder = pathlib.Path(__file__).parent
with open(folder / "uv.log", "a") as file:
    print(*sys.argv[1:], file=file)
if sys.argv[1] == "venv":
    venv.create(sys.argv[-1])
    (packages,) = pathlib.Path(sys.argv[-1]).glob("lib/*/site-packages")
    (packages / "packages.pth").write_text(str(folder) + chr(10) + r"{packages}")
sys.exit(sys.argv[1] == "{broken}")
"""
PYTEST = 'import sys; print("pytest", *sys.argv[1:]); sys.exit("fail" in sys.argv)'


def test_the_page_lists_the_versions_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name not in DEVELOPMENT}
    expected = {(need, extra) for extra, needs in {"": project["dependencies"], **extras}.items() for need in needs}
    page = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| ([\d.]+) \| (?:`(\w+)` )?\|$", page, re.M)
    assert {(f"{package}>={version}", extra) for package, version, extra in rows} == expected
    assert project["requires-python"] == ">=3.10"
    oldest = {package: version for package, version, _ in rows}
    assert f"Python 3.10 to 3.14, with PyTorch {oldest['torch']} or later" in " ".join(page.split())
    for name in ("README.md", "docs/start/install.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "Python 3.10 or later" in text
        assert f"PyTorch {oldest['torch']} or later" in text


def check_versions(folder: Path, *arguments: str, broken: str = "") -> tuple[int, str]:
    """Run the script with the stand-ins; return its exit status and what it printed."""
    packages = sysconfig.get_paths()["purelib"]
    (folder / "uv").write_text(UV.format(python=sys.executable, packages=packages, broken=broken))
    (folder / "uv").chmod(0o755)
    (folder / "pytest.py").write_text(PYTEST)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, SCRIPT, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run(command, cwd=folder, **pipes, text=True, check=False, env={**os.environ, "PATH": path})
    return result.returncode, result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for uv is no command on Windows")
def test_an_environment_is_built_for_the_oldest_and_for_the_newest_versions(tmp_path: Path) -> None:
    status, output = check_versions(tmp_path, "--prerelease", "--keep", "kept", "--", "-x", "tests/hooks")
    assert status == 0, output
    assert output.endswith("lowest: passed\nnewest: passed\n")
    assert output.count("\npytest -n 2 -x tests/hooks\n") == 2
    assert output.count(f", torch {torch.__version__.partition('+')[0]}") == 2
    venv, lowest, _, newest = (tmp_path / "uv.log").read_text().splitlines()
    assert venv.endswith(f"--python {sys.executable} {tmp_path / 'kept/lowest'}")
    assert lowest.endswith("--resolution lowest-direct --editable .[test]")
    assert newest.endswith("--resolution highest --prerelease allow --editable .[test]")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for uv is no command on Windows")
@pytest.mark.parametrize(
    ("arguments", "broken", "outcome"),
    [
        ([], "venv", "the environment cannot be built"),
        ([], "pip", "the environment cannot be built"),
        (["fail"], "", "tests failed"),
    ],
)
def test_a_failure_is_the_exit_status(tmp_path: Path, arguments: list[str], broken: str, outcome: str) -> None:
    status, output = check_versions(tmp_path, "--only", "newest", "--", *arguments, broken=broken)
    assert (status, output.splitlines()[-1]) == (1, f"newest: {outcome}")


def test_without_uv_one_line_says_how_to_install_it(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", SCRIPT]
    env = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "check_versions needs uv, which is not installed: pip install uv\n"
