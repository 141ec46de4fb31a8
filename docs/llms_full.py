"""Write all pages of these docs, the functions and the commands into one plain Markdown file, for coding agents.

The build of the site writes the file beside llms.txt. Without a build: `python docs/llms_full.py llms-full.txt`
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import gradcam
from gradcam.cli import cli

DOCS = Path(__file__).resolve().parent
INTRODUCTION = f"""\
# gradcam {gradcam.__version__}: all documentation

All pages of the documentation as plain Markdown, in the order of the site. Each page begins with a line
`Page: <file in docs/>`; links name these files. A shorter file is llms.txt.
"""
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<head>[^\n]*)\n(?P<code>.*?)^(?P=ticks)$\n?", re.M | re.S)
OPTION = re.compile(r"^:(?P<name>[\w-]+):[ \t]*(?P<value>.*)$", re.M)
SPHINX_PAGES = ("auto_gallery/",)  # built by Sphinx from scripts, not from Markdown


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", write_beside_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write_beside_site(app: Any, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / "llms-full.txt").write_text(join_pages(), encoding="utf-8")


def join_pages() -> str:
    """Return all pages, in the order of the tables of contents."""
    pages = [f"Page: {name}\n\n{read_page(DOCS / name).strip()}\n" for name in list_pages("index.md")]
    return "\n".join([INTRODUCTION, *pages])


def list_pages(name: str) -> Iterator[str]:
    """Yield the file of a page, then those of the pages in its table of contents."""
    yield name
    text = (DOCS / name).read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        if fence["head"] == "{toctree}":
            for line in OPTION.sub("", fence["code"]).split():
                if not line.startswith(SPHINX_PAGES):
                    yield from list_pages((Path(name).parent / f"{line}.md").as_posix())


def read_page(path: Path) -> str:
    """Return a page in which the directives of Sphinx are replaced by their content."""
    text = path.read_text(encoding="utf-8").replace("{{ version }}", gradcam.__version__)
    parts, position = [], 0
    for fence in FENCE.finditer(text):
        parts += [read_prose(text[position : fence.start()], path), read_fence(fence, path)]
        position = fence.end()
    return "".join([*parts, read_prose(text[position:], path)])


def read_prose(text: str, path: Path) -> str:
    """Return text without comments and colon fences, and with links that name files in docs/."""
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    text = re.sub(
        r"^:{3,}\{grid-item-card\} (.+)\n:link: (\S+)\n:link-type: doc\n", r"**\1** ([\2](/\2.md)): ", text, flags=re.M
    )
    text = re.sub(r"^:{3,}.*\n?", "", text, flags=re.M)
    text = OPTION.sub("", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", lambda link: f"]({locate(link[1], path)})", text)


def locate(link: str, path: Path) -> str:
    """Return the address of a link as a path that begins in docs/."""
    if link.startswith("/"):
        return link[1:]
    target, mark, place = link.partition("#")
    resolved = (path.parent / target).resolve()
    base = DOCS if resolved.is_relative_to(DOCS) else DOCS.parent
    return f"{'' if base == DOCS else '../'}{resolved.relative_to(base).as_posix()}{mark}{place}"


def read_fence(fence: re.Match[str], path: Path) -> str:
    head, code = fence["head"].strip(), fence["code"]
    directive = re.match(r"\{([\w-]+)\}\s*(\S*)", head)
    if directive is None:
        return fence[0]
    name, file = directive.groups()
    options = {option["name"]: option["value"].strip('" ') for option in OPTION.finditer(code)}
    if name == "include":
        text = (path.parent / file).read_text(encoding="utf-8")
        text = text.partition(options["start-after"])[2] if "start-after" in options else text
        return (text.partition(options["end-before"])[0] if "end-before" in options else text).strip() + "\n"
    if name == "literalinclude":
        text = (path.parent / file).read_text(encoding="utf-8")
        return f"```{options.get('language', 'text')}\n{text.rstrip()}\n```\n"
    if name == "eval-rst":
        return "\n\n".join(read_rst(code)) + "\n"
    return ""


def read_rst(text: str) -> Iterator[str]:
    """Yield headings, functions with their docstrings, constants and commands."""
    for block in re.split(r"\n(?=\S)", text):
        lines = block.strip().splitlines()
        if block.startswith(".. autosummary::"):
            for line in lines[1:]:
                if line.strip() and not line.strip().startswith(":"):
                    yield describe(line.strip())
        elif block.startswith(".. data::"):
            yield f"### gradcam.{lines[0].split()[-1]}\n\n" + " ".join(" ".join(lines[1:]).split())
        elif block.startswith(".. click::"):
            yield from describe_commands()
        elif len(lines) == 1 and lines[0] and not re.match(r"\.\. |[-=]+$", lines[0]):
            yield f"## {lines[0]}"


def describe(name: str) -> str:
    """Return the signature and the docstring of a public name."""
    module, value = "gradcam", gradcam
    for part in name.split("."):
        module = f"{module}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(module)
    try:
        signature = re.sub(r"<.*? at 0x\w+>", "...", str(inspect.signature(value)).replace("'", ""))
    except (TypeError, ValueError):
        signature = ""
    return f"### gradcam.{name}\n\n```text\n{name.rpartition('.')[2]}{signature}\n\n{inspect.getdoc(value) or ''}\n```"


def describe_commands() -> Iterator[str]:
    """Yield the short help of each command."""
    context = click.Context(cli, info_name="gradcam")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        own = click.Context(command, info_name=name, parent=context, max_content_width=100, terminal_width=100)
        yield f"### gradcam {name}\n\n```text\n{command.get_help(own)}\n```"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(join_pages(), encoding="utf-8")
