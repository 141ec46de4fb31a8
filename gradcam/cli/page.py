"""`gradcam page`: write an interactive HTML page of an image, or a gallery of such pages."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import Attempt, make_folder, prepare_request, require_images
from gradcam.cli._page_maker import PageMaker
from gradcam.cli._settings import OutputMode, to_settings
from gradcam.cli._terminal import format_title, format_written_path, show_pass_progress
from gradcam.cli.batch import BatchOptions, run_batch
from gradcam.errors import escape_controls
from gradcam.images.files import is_url, join_name

PAGE_SUFFIXES = (".html", ".htm")
OUTPUT_OPTIONS = ("overwrite", "resume", "url")


def _check_address(url: str) -> str:
    from gradcam.web.preview import check_address

    return check_address(url)


@click.command("page", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.page_options()
@click.option("--check", "is_checked", is_flag=True, help="Test whether the first heatmap can be trusted.")
@options.output_option(
    "Output file (.html) or folder. For several images, give a folder.  [default: <image>.html]", default=None
)
@options.option(
    "--url URL",
    "Address at which you will publish the page. A preview image for chats (.png) is also written.",
    _check_address,
)
@click.option("--overwrite", is_flag=True, help="For a folder: delete the results of an earlier run and start again.")
@click.option("--resume", is_flag=True, help="For a folder: continue an earlier run.")
@click.option("-q", "--quiet", is_flag=True, is_eager=True, help="Print errors only.")
def page_command(
    inputs: tuple[str, ...], quiet: bool, output: str | None, is_checked: bool, top: int, **params: Any
) -> int:  # fmt: skip
    """Write an HTML page of an image, with the heatmaps of every class.

    The page is one file that contains the image, the heatmaps and the code. It opens in any browser, without a server
    or an internet connection, so you can send it by mail. You can choose any class, and compare the signed heatmaps of
    two classes. If you point at a part of the image, the page lists the classes that this part supports. With the
    methods gradcam and hirescam, all classes have heatmaps. With other methods, or if the heatmaps of all classes would
    cost too much, only the most probable classes have heatmaps.

    INPUT is a file, folder, glob, list or archive, as for `gradcam batch`. For several images, each image gets a page,
    and index.html is a gallery with links to the pages. Overlays and records are then also written, as with `gradcam batch
    --report --pages`.
    """
    output_mode = OutputMode(as_json=False, quiet=quiet)
    settings = to_settings({name: value for name, value in params.items() if name not in OUTPUT_OPTIONS})
    make_page = PageMaker(settings, top, is_whole=True, is_checked=is_checked)
    is_file = output is not None and Path(output).suffix.lower() in PAGE_SUFFIXES and not os.path.isdir(output)
    image = _find_single_image(inputs)
    if image is not None:
        require_images([image], output_mode)
        return _write_page(image, make_page, output_mode, output, is_file=is_file, url=params["url"])
    if params["url"] is not None:
        raise click.UsageError("--url needs exactly one image, but several were given: run the command for each image.")
    if output is None or is_file:
        problem = "no --output" if output is None else f"{output} is one file"
        raise click.UsageError(f"There are several images, but {problem}: give a folder to --output.")
    folder = options.FOLDER.convert(output, None, None)
    selected = {"resume": params["resume"], "overwrite": params["overwrite"], "report": True, "pages": True}
    return run_batch(BatchOptions(inputs, settings, output_mode, folder, **selected, make_page=make_page))


def _find_single_image(inputs: tuple[str, ...]) -> Path | None:
    """Return the image if the input is a single image file, else None. An archive or list counts as several images."""
    from gradcam.sources.collect import list_inputs

    if len(inputs) > 1 or is_url(inputs[0]) or os.path.isdir(inputs[0]):
        return None
    if not os.path.lexists(inputs[0]) and not any(sign in inputs[0] for sign in "*?["):
        return Path(inputs[0])  # The file does not exist. The error is reported when the file is read.
    listing = list_inputs(inputs)
    path = Path(inputs[0])
    is_single = len(listing.items) == 1 and listing.items[0].content.path is not None
    return path if is_single and os.path.samefile(str(listing.items[0].content.path), path) else None


def _write_page(
    image: Path, make_page: PageMaker, output_mode: OutputMode, output: str | None, *, is_file: bool, url: str | None
) -> int:
    from gradcam.web.preview import find_preview_file

    file = Path(output) if is_file and output else Path(output or ".") / join_name(image.stem, ".html")
    if url is not None:
        find_preview_file(file)  # Refuse to overwrite an unrelated file before the model is loaded.
    classifier, request = prepare_request(make_page.settings, output_mode)
    start, attempt = time.perf_counter(), Attempt(image)
    with attempt.catch_errors():
        if file.parent.is_symlink() or not file.parent.is_dir():
            make_folder(file.parent)
        prepared = replace(classifier.prepare(image), further_images=list(request.others.values()))
        with show_pass_progress(output_mode) as progress:
            page = replace(make_page(classifier, prepared, progress), name=image.name)
        page.save(file, url=url)
    if attempt.error is not None:
        click.echo(attempt.error, err=True)
        return 1
    if not output_mode.quiet:
        target, seconds = page.targets, time.perf_counter() - start
        sets = [f"{maps.method} at {maps.layer}" for maps in page.maps]
        click.echo(format_title(str(image), page.image.shape, page.model, classifier.device, seconds))
        first, more = escape_controls(target.names[page.first]), len(target.names) - 1
        click.echo(f"\n  Heatmaps of {first} and {more:,} more, by {escape_controls(', '.join(sets))}")
        if page.verdict is not None:
            click.echo(f"  Check: {page.verdict['outcome']}. {escape_controls(page.verdict['summary'])}")
        for note in page.notes:
            click.echo(f"  {escape_controls(note)}")
        click.echo(f"{format_written_path(str(file))}   {file.stat().st_size / 1e6:.2f} MB\n")
        if url is not None:
            click.echo(f"{format_written_path(str(file.with_suffix('.png')))}   preview, to publish beside the page\n")
    return 0
