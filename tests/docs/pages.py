"""Run each block of Python and each command of a page, in order, in a folder with the files that the page names.

A comment before a block marks a special case:

    <!-- raises LayerError: has no layer -->    the block of Python ends with this error and message
    <!-- status 1 -->                           the last command ends with this status
    <!-- prints -->                             the text block is the output of the block before it; times may differ
    <!-- elsewhere -->                          a separate test runs it
    <!-- line test -->                          scripts/check runs it
    <!-- needs ultralytics -->                  the block runs only if this package is installed; may precede another mark
    <!-- slow -->                               the test of the page is marked as slow

Commands of `gradcam` run in this process, everything else in a shell. `git clone` and `pip install` are not run: a
page installs this repository, with extras that exist.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from gradcam.cli import cli

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^ *```$", re.S | re.M)
NOTE = re.compile(r"<!-- (.+?) -->\s*\Z")
NEEDS = re.compile(r"<!-- needs (\w+) -->\s*\Z")
MARKS = ("raises ", "status ", "prints", "slow", "line ", "elsewhere")
INSTALLS = re.compile(r"""pip install (-e )?(\.|"\.\[(?P<extras>[\w,]+)\]"|"git\+<this repository>")( +#.*)?""")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    `line` is the line where its code begins, `mark` is the comment before it, or "", and `package` is the package that
    it needs, or "".
    """

    page: str
    line: int
    language: str
    code: str
    mark: str
    package: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    page = path.relative_to(ROOT).as_posix()
    blocks = []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        note = NOTE.search(before)
        mark = note[1] if note and note[1].startswith(MARKS) else ""
        package = NEEDS.search(before[: note.start()] if note and mark else before)
        code = re.sub(rf"^{fence['indent']}", "", fence["code"], flags=re.M)
        line = text[: fence.start("code")].count("\n")
        blocks.append(Block(page, line, fence["language"], code, mark, package[1] if package else ""))
    return blocks


def run_page(path: Path) -> dict[str, Any]:
    """Run a page's blocks in the current folder, and return the names that its Python defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in read_blocks(path):
        if block.mark in ("elsewhere", "line test"):
            continue
        if block.package and importlib.util.find_spec(block.package) is None:
            continue
        if block.language == "python":
            printed = run_python(block, names)
        elif block.language == "bash":
            printed = run_commands(block)
        elif block.mark == "prints":
            assert normalise_output(printed) == normalise_output(block.code), block.where
    return names


def run_python(block: Block, names: dict[str, Any]) -> str:
    """Run a block of Python and return its output. Errors name the line of the page."""
    code = compile("\n" * block.line + block.code, block.page, "exec")
    kind, _, words = block.mark.removeprefix("raises ").partition(": ")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        if block.mark.startswith("raises "):
            with pytest.raises(Exception, match=re.escape(words)) as caught:
                exec(code, names)
            assert caught.type.__name__ == kind, f"{block.where}: {caught.type}"
        else:
            exec(code, names)
    return output.getvalue()


def run_commands(block: Block) -> str:
    """Run a block of commands and return their standard output."""
    lines = [line for line in block.code.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    printed = ""
    for number, line in enumerate(lines):
        expected = int(block.mark.split()[1]) if block.mark.startswith("status ") and number == len(lines) - 1 else 0
        status, output = run_command(line)
        printed += output
        assert status == expected, f"{block.where}: {line}\n{output}"
    return printed


def run_command(line: str) -> tuple[int, str]:
    words = shlex.split(line, comments=True)
    if words[:2] == ["git", "clone"]:
        return 0, ""
    if words[:2] == ["pip", "install"]:
        installed, _, remaining = line.partition(" && ")
        check_installed(installed)
        return run_command(remaining) if remaining else (0, "")
    if words[0] != "gradcam" or {"|", ">", "&&", ";"} & set(words) or "$" in line:
        ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=environment())
        return ended.returncode, ended.stdout + (ended.stderr if ended.returncode else "")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            status = cli.main(words[1:], standalone_mode=False, prog_name="gradcam")
        except click.ClickException as error:
            return error.exit_code, f"{output.getvalue()}{error.format_message()}"
        except SystemExit as error:
            status = error.code
    return status or 0, output.getvalue()


def environment() -> dict[str, str]:
    """Return an environment with the commands of this Python, and this package."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


def check_installed(line: str) -> None:
    match = INSTALLS.fullmatch(line)
    assert match, f"does not install this repository: {line}"
    if match["extras"] and sys.version_info >= (3, 11):
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(match["extras"].split(",")) <= project["optional-dependencies"].keys(), f"no such extra: {line}"


def normalise_output(text: str) -> str:
    """Return the text without times and without spaces at the end of lines, which differ between runs."""
    text = re.sub(r"\d+\.\d s", "T s", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
