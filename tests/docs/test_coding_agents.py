"""Test the files for coding agents: llms.txt, llms-full.txt and the skill."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradcam
from gradcam.cli import cli
from tests.docs.pages import ROOT, read_blocks, run_page

LLMS, SKILL = ROOT / "llms.txt", ROOT / "skills/gradcam/SKILL.md"
SITE = ROOT / "docs/_build/html"
BUILT = {"_build", "auto_gallery", "generated", "gallery"}
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if not BUILT & set(path.relative_to(ROOT).parts))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the text that the script writes, without Sphinx."""
    for package in ("lightning", "transformers"):  # The text describes the callbacks for these packages.
        pytest.importorskip(package)
    path = tmp_path_factory.mktemp("site") / "llms-full.txt"
    subprocess.run([sys.executable, str(ROOT / "docs/llms_full.py"), str(path)], check=True, cwd=path.parent)
    return path.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", [LLMS, SKILL], ids=lambda path: path.name)
def test_the_code_of_the_file_runs(path: Path, workspace: Path) -> None:
    names = run_page(path)
    assert names["explanation"].heatmaps is not None
    assert gradcam.read_image("overlay.png").ndim == 3


@pytest.mark.parametrize("path", [LLMS, SKILL], ids=lambda path: path.name)
def test_the_files_and_functions_that_the_file_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"`((?:docs|skills|scripts)/[\w/.]*)", text):
        assert (ROOT / link).exists(), link
    functions = set(re.findall(r"\bgradcam\.([\w.]*\w)\(", text)) | set(re.findall(r"\b(targets\.\w+)", text))
    assert len(functions) > 8
    for function in functions:
        value = gradcam
        for part in function.split("."):
            value = getattr(value, part)


def test_the_skill_is_short_and_says_when_to_use_it() -> None:
    text = SKILL.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    matter = re.match(r"---\nname: (?P<name>[a-z-]+)\ndescription: (?P<description>.+)\n---\n", text)
    assert matter is not None
    assert matter["name"] == SKILL.parent.name
    assert "Use it to" in matter["description"]
    assert len(matter["description"]) <= 1024  # the limit of the format


def test_the_full_text_has_every_page_with_its_code(full: str) -> None:
    names = re.findall(r"^Page: (.+)$", full, re.M)
    assert sorted(names) == [path.relative_to(ROOT / "docs").as_posix() for path in PAGES]
    assert len(set(names)) == len(names)
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert re.search(r"^# .+$", text, re.M)[0] in full, path
        for block in read_blocks(path):
            assert block.code.strip() in full, block.where


def test_the_full_text_is_plain_markdown(full: str) -> None:
    outside = re.sub(r"^(`{3,}).*?^\1$", "", full, flags=re.M | re.S)
    assert re.findall(r"^.*(?:<!--|:::|\{\{|\{toctree\}|eval-rst|\.\. \w+::|:link).*$", outside, re.M) == []
    assert re.findall(r"^```\{.*$", full, re.M) == []


def test_the_links_of_the_full_text_name_files(full: str) -> None:
    outside = re.sub(r"^(`{3,}).*?^\1$|`[^`\n]*`", "", full, flags=re.M | re.S)
    links = set(re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", outside))
    assert "howto/zeros.md" in links
    lost = [link for link in links if not link.startswith("auto_gallery/") and not (ROOT / "docs" / link).exists()]
    assert lost == []


def test_the_full_text_has_every_function_and_command(full: str) -> None:
    api = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    names = re.findall(r"^   ([A-Za-z][\w.]*)$|^\.\. data:: (\S+)$", api, re.M)
    assert len(names) > 100
    headings = set(re.findall(r"^### gradcam\.(\S+)$", full, re.M))
    assert headings == {name or constant for name, constant in names}
    assert inspect_first_line(gradcam.explain) in full
    commands = set(re.findall(r"^### gradcam ([\w-]+)$", full, re.M))
    assert {"run", "batch", "check", "layers"} <= commands == set(cli.list_commands(None))


def inspect_first_line(function: object) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


@pytest.mark.slow
@pytest.mark.skipif(not SITE.exists(), reason="the site is not built: sphinx-build docs docs/_build/html")
def test_the_site_serves_both_files(full: str) -> None:
    assert (SITE / "llms-full.txt").read_text(encoding="utf-8") == full
    assert (SITE / "llms.txt").read_bytes() == LLMS.read_bytes()


def test_the_build_of_the_site_writes_the_full_text(full: str, tmp_path: Path) -> None:
    """Build a site of one page with the extension alone, because the whole site takes minutes."""
    pytest.importorskip("sphinx")
    assert '"llms_full"' in (ROOT / "docs/conf.py").read_text(encoding="utf-8")
    (tmp_path / "index.rst").write_text("Title\n=====\n", encoding="utf-8")
    options = ["-q", "-C", "-D", "extensions=llms_full", str(tmp_path), str(tmp_path / "out")]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "docs")])
    command = [sys.executable, "-m", "sphinx", *options]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})
    assert (tmp_path / "out/llms-full.txt").read_text(encoding="utf-8") == full
