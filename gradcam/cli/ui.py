"""`gradcam ui`: a local page, on which pictures are dropped and explained."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command, to_weights
from gradcam.cli._job import load_model, say
from gradcam.cli._page import to_code
from gradcam.cli._settings import ModelChoice, Output, to_model_choice
from gradcam.cli._terminal import Terminated, acknowledge, import_torch
from gradcam.errors import GradcamError, printable, to_pip_command

if TYPE_CHECKING:
    from gradcam.images.read import Pixels
    from gradcam.models.classifier import Classifier
    from gradcam.ui.jobs import Jobs
    from gradcam.ui.models import Loaded, Wanted

HERE = "127.0.0.1"
PORT = 8765


@click.command("ui", cls=Command)
@click.argument("places", nargs=-1, metavar="[IMAGE|FOLDER]...", type=click.Path(path_type=Path))
@options.model
@click.option(
    "--port",
    type=options.integer(0, 65535),
    default=PORT,
    show_default=True,
    metavar="N",
    help="Port of the page. 0: any free port.",
)
@click.option(
    "--host",
    default=HERE,
    show_default=True,
    metavar="ADDRESS",
    help="Network address. With an address other than 127.0.0.1, other machines can connect if they have the token.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser; only print the address.")
def ui_command(places: tuple[Path, ...], port: int, host: str, no_browser: bool, **chosen: Any) -> int:
    """Explain images interactively: a local page in your browser.

    Drop images on the page, and choose a model, layer, method and class: the heatmap is updated at once. If you brush over
    a part of the image, or move a window over it, the scores and the heatmap are computed without this part. You can
    compare two models, or two checkpoints of one model. You can copy everything you do as a command.

    The images, folders and output folders of `gradcam batch` that you give are listed on the left. This command needs two
    more packages:

    \b
      pip install starlette uvicorn
    """
    sockets = [_bind(host, port)]
    port = sockets[0].getsockname()[1]
    try:
        import uvicorn  # noqa: F401  (whether it is there)

        import_torch()
        from gradcam.models.providers import DEFAULT
        from gradcam.ui.answers import Answers
        from gradcam.ui.models import Models, Wanted
        from gradcam.ui.pictures import Pictures, list_pictures
        from gradcam.ui.server import EVERYWHERE, Server, Start, find_address, find_hosts
    except ImportError as error:
        if error.name in ("uvicorn", "starlette"):
            raise GradcamError(f"gradcam ui needs starlette and uvicorn: {to_pip_command('ui')}") from error
        raise
    files = list_pictures(places)
    usual = replace(to_model_choice(chosen), task="auto")
    models = Models(lambda wanted: _load(usual, chosen["reshape"], wanted))
    say(models.get(Wanted()).classifier.notes, Output(as_json=False, quiet=False))
    answers = Answers(models, Pictures(files, _to_read(models.get(Wanted()).classifier)))
    answers.warm_up()
    server = Server(answers, Start(usual.model or DEFAULT))
    address = sockets[0].getsockname()[0].partition("%")[0]
    if not ipaddress.ip_address(address).is_loopback:
        click.echo(
            f"Warning: with --host {host}, anyone who has the address with the token can use this page.", err=True
        )
    is_everywhere = host in EVERYWHERE
    page = f"http://{_to_name(HERE if is_everywhere else host)}:{port}/"
    elsewhere = find_address() if is_everywhere else None
    click.echo(f"{page}?token={server.token}")
    if elsewhere is not None:
        click.echo(f"From other machines: http://{elsewhere}:{port}/?token={server.token}")
    click.echo("Press Ctrl+C to stop.")
    if not no_browser:
        # A command line can be read by whoever uses this machine: what is on this one is worth nothing, once used.
        webbrowser.open(f"{page}?once={server.once}")
    application = server.to_application(find_hosts(host, port), takes_addresses=is_everywhere)
    return _serve(application, sockets, server.jobs)


def _to_name(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _serve(application: Any, sockets: list[socket.socket], jobs: Jobs) -> int:
    """Answer until a signal comes, which no job outlives; the status."""
    import uvicorn

    config = uvicorn.Config(
        application, log_level="error", lifespan="off", access_log=False, ws="none",
        timeout_graceful_shutdown=2,
    )  # fmt: skip

    class Ending(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            jobs.stop()  # uvicorn waits for answers
            super().handle_exit(sig, frame)

    status = 0
    try:
        Ending(config).run(sockets=sockets)
    except KeyboardInterrupt:
        pass
    except Terminated as error:
        status = error.status
    acknowledge()
    if not jobs.close():  # Python would wait for the thread, in a pass that takes long
        sys.stdout.flush()
        os._exit(status)
    return status


def _to_read(classifier: Classifier) -> Callable[[Any], Pixels]:
    """How pictures are read to be shown: as the model that was named reads them."""
    from gradcam.models.preprocess import to_reading

    reader = classifier.reader
    return lambda given: to_reading(given, reader).picture


def _load(usual: ModelChoice, reshape: Any, wanted: Wanted) -> Loaded:
    """The model that was named with the command keeps the options that were given with it; others have none of them."""
    from gradcam.models.providers import DEFAULT
    from gradcam.ui.models import Loaded

    is_usual = wanted.model in (None, usual.model or DEFAULT)
    choice = usual
    if not is_usual:
        choice = ModelChoice(wanted.model, device=usual.device, precision=usual.precision, task="auto")
    try:
        if wanted.weights is not None:
            choice = replace(choice, weights=to_weights(wanted.weights))
        classifier = load_model(replace(choice, prompts=wanted.texts))
    except click.UsageError as error:
        raise GradcamError(error.message) from error
    said = replace(choice, task=None)
    code = to_code(said, is_class=classifier.task == "classification")
    return Loaded(classifier, tuple(said.to_words()), code, reshape if is_usual else None)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        if _is_ours(host, port):
            raise GradcamError(
                f"gradcam ui is already running on port {port}: use the address that it printed, or give --port 0."
            ) from error
        raise GradcamError(f"{printable(host)}:{port} cannot be used ({error.strerror}): give --port 0.") from error
    return found


def _is_ours(host: str, port: int) -> bool:
    """Whether another `gradcam ui` answers there."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(HERE if host in ("0.0.0.0", "::") else host, port, timeout=2)
        connection.request("GET", "/alive", headers={"Host": f"{HERE}:{port}"})
        return b"gradcam" in connection.getresponse().read(100)
    return False
