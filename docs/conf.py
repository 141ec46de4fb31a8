"""How the site is built: `sphinx-build -W docs docs/_build/html`, without the network."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes
from sphinx_gallery.scrapers import figure_rst

import gradcam
from gradcam.cli._commands import format_examples

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the gallery's models of drawn images are in `tests`
PICTURES = {".png", ".jpg", ".webp"}

project = "gradcam"
author = copyright = "the developers of gradcam"
version = release = gradcam.__version__
language = "en"
smartquotes = False  # --option is not –option

extensions = [
    "myst_parser",
    "page_images",
    "llms_full",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_templates", "gallery"]
templates_path = ["_templates"]
default_role = "py:obj"  # `explain` is a link in docstrings
nitpicky = False
suppress_warnings = ["config.cache"]  # the gallery's functions cannot be pickled

myst_enable_extensions = ["colon_fence", "attrs_block", "substitution"]
myst_substitutions = {"version": gradcam.__version__}
myst_fence_as_directive = ["math"]  # GitHub draws these blocks, too
myst_heading_anchors = 3
html_math_renderer = "mathml"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

autosummary_generate = True
autodoc_typehints = "none"  # the sections of docstrings say shapes and ranges as well
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "reader, find"}  # fields that hold a function
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "gradcam"
html_logo = html_favicon = "_static/mark.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # they are fetched, which a page opened from a disk may not do
html_context = {"default_mode": "auto"}  # dark or light as the system is
html_extra_path = ["../llms.txt"]
html_theme_options = {
    "logo": {"text": "gradcam"},
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


class Written:
    """Shows the pictures that a script of the gallery wrote, below the block that wrote them."""

    def __repr__(self) -> str:
        return "Written"

    def __call__(self, block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
        folder = Path(block_vars["src_file"]).parent
        new = sorted((it for it in folder.iterdir() if it.suffix in PICTURES), key=lambda it: it.stat().st_mtime_ns)
        shown = []
        for file in new:
            target = Path(next(block_vars["image_path_iterator"])).with_suffix(file.suffix)
            shutil.move(file, target)
            shown.append(str(target))
        return figure_rst(shown, gallery_conf["src_dir"]) if shown else ""


def forget(gallery_conf: dict[str, Any], file: str) -> None:
    """Between two scripts: what the one before wrote that is no picture."""
    import torch

    torch.manual_seed(0)


# Scripts find `assets/` beside themselves, as somebody finds it who runs them where the repository is.
for section in (HERE / "gallery").glob("[0-9]*"):
    shutil.copytree(HERE.parent / "assets", section / "assets", dirs_exist_ok=True)
os.environ.setdefault("OMP_NUM_THREADS", "2")

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"\.py",
    "ignore_pattern": r"__init__|assets",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": (Written(),),
    "reset_modules": (forget,),
    "show_memory": False,
    "min_reported_time": 1e6,
    "remove_config_comments": True,
    "abort_on_example_error": True,
    "copyfile_regex": "",
}


def show_as_typed(app: Any, context: Any, lines: list[str]) -> None:
    """Help is no markup: *.jpg is not emphasised, and what has lines of its own keeps them."""
    found: list[str] = []
    for line in lines:
        in_block = bool(found) and found[-1].startswith("   ")
        if not line.startswith("| "):
            found += ["", line.replace("*", r"\*")] if in_block else [line.replace("*", r"\*")]
        else:
            found += [f"   {line[2:]}"] if in_block else ["", ".. code-block:: text", "", f"   {line[2:]}"]
    lines[:] = found


def add_examples(app: Any, context: Any, lines: list[str]) -> None:
    """Add a command's examples, which are in its help before the description."""
    lines += ["", ".. code-block:: text", "", *(f" {line}" for line in format_examples(context)[2:]), ""]


def write_math(writer: Any, node: Any) -> None:
    """Write an equation as MathML, which browsers draw without a script from the network."""
    writer.body.append(
        latex2mathml.converter.convert(node.astext(), display="block" if node.tagname == "math_block" else "inline")
    )
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", inline_renderers=(write_math, None), block_renderers=(write_math, None))
    app.connect("sphinx-click-process-description", show_as_typed)
    app.connect("sphinx-click-process-description", add_examples)
    app.connect("sphinx-click-process-epilog", show_as_typed)
