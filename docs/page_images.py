"""Show on each page the images that its commands and snippets make. Sphinx draws them while it builds the site.

A comment below a block of a page asks for an image, with the image's description:

    <!-- image photo-gradcam.png: The photo with a heatmap -->      a file that the block above writes
    <!-- image one.png two.png: The photo with two heatmaps -->     two files, side by side
    <!-- image gallery/3_tasks/each_box: Boxes with heatmaps -->    the first image of a script of the gallery
    <!-- image gallery/3_tasks/each_box#2: Other boxes -->          its second image

Only blocks above such a comment run: the commands of the last block or, for Python, all blocks of Python up to the
comment. They run in a folder with photographs, and use the embedded classifier. Where the page's own model has random
weights, the page shows an image of the gallery, whose models are trained.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError

from gradcam.cli import cli
from tests.docs.labelled import make_labelled

DOCS = Path(__file__).parent
ASSETS = DOCS.parent / "assets"
FOLDER = "_images_of_pages"
MARK = re.compile(r"^<!-- image (?P<sources>[^:]+): (?P<description>[^>]+?) -->$", re.M)
FENCE = re.compile(r"^```(?P<language>bash|python)\n(?P<code>.*?)^```$", re.M | re.S)


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", insert_images)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def insert_images(app: Any, page: str, source: list[str]) -> None:
    """Replace the comments of a page by images."""
    text = source[0]
    if not MARK.search(text):
        return
    shown = DOCS / FOLDER / page.replace("/", "_")
    shutil.rmtree(shown, ignore_errors=True)
    shown.mkdir(parents=True)
    names: dict[str, Any] = {"__name__": "__main__"}
    parts, position, ran = [], 0, 0
    with in_workspace():
        for mark in MARK.finditer(text):
            description, sources = " ".join(mark["description"].split()), mark["sources"].split()
            files = [source for source in sources if not source.startswith("gallery/")]
            if files:
                try:
                    _run_blocks([*FENCE.finditer(text, ran, mark.start())], names)
                    for file in files:
                        shutil.copy(file, shown)
                except (Exception, SystemExit) as error:
                    raise ExtensionError(f"{page}: no image {' '.join(files)}: {error!r}") from error
                ran = mark.start()
            images = [
                f"![{description}](/{FOLDER}/{shown.name}/{Path(source).name})"
                if source in files
                else _show_gallery_image(source, description)
                for source in sources
            ]
            parts += [text[position : mark.start()], "\n".join(images)]
            position = mark.end()
    source[0] = "".join([*parts, text[position:]])


def _show_gallery_image(source: str, description: str) -> str:
    """Return Markdown of an image of the gallery that links to its script."""
    path, _, number = source.removeprefix("gallery/").partition("#")
    section, script = path.split("/")
    (image,) = (DOCS / "auto_gallery" / section / "images").glob(f"sphx_glr_{script}_{int(number or 1):03}.*")
    return f"[![{description}](/{image.relative_to(DOCS).as_posix()})](/auto_gallery/{section}/{script})"


def _run_blocks(blocks: list[re.Match[str]], names: dict[str, Any]) -> None:
    """Run the commands of the last block, or all blocks of Python if the last block is Python."""
    if blocks[-1]["language"] == "bash":
        for line in blocks[-1]["code"].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["gradcam"]:
                with contextlib.redirect_stdout(io.StringIO()):
                    status = cli.main(words[1:], standalone_mode=False, prog_name="gradcam")
                if status:
                    raise RuntimeError(f"{line} ended with status {status}")
        return
    for fence in blocks:
        if fence["language"] == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(fence["code"], names)


@contextlib.contextmanager
def in_workspace() -> Iterator[None]:
    """Make a new folder with the photographs that pages name the current folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            shutil.copytree(ASSETS, "assets")
            shutil.copy(ASSETS / "coffee.jpg", "photo.jpg")
            shutil.copy(ASSETS / "camera.png", "other.png")
            Path("photos").mkdir()
            for name in ("coffee.jpg", "rocket.jpg"):
                shutil.copy(ASSETS / name, "photos")
            make_labelled(Path("labelled"))
            yield
        finally:
            os.chdir(before)
