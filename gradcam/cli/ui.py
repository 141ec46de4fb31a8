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
from gradcam.cli._commands import Command
from gradcam.cli._job import load_model, say
from gradcam.cli._page import to_code
from gradcam.cli._settings import ModelChoice, Output, to_model_choice
from gradcam.cli._terminal import Terminated, acknowledge, import_torch
from gradcam.errors import GradcamError, printable

if TYPE_CHECKING:
    from gradcam.images.read import Pixels
    from gradcam.models.classifier import Classifier
    from gradcam.ui.jobs import Jobs
    from gradcam.ui.models import Loaded, Wanted

HERE = "127.0.0.1"
PORT = 8765


@click.command("ui", cls=Command)
@click.argument("places", nargs=-1, metavar="[PICTURE|FOLDER]...", type=click.Path(path_type=Path))
@options.model
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 takes any free one.")
@click.option("--host", default=HERE, show_default=True, help="Another address lets other machines in, with the token.")
@click.option("--no-browser", is_flag=True, help="Open no browser; the address is printed.")
def ui_command(places: tuple[Path, ...], port: int, host: str, no_browser: bool, **chosen: Any) -> int:
    """Open a local page: drop pictures on it, choose model, layer, method and class, and see the map at once.

    Brush over a part, or move a window over the picture, and the scores and the map follow. Two models, or two checkpoints
    of one, are compared. Pictures, folders, and output folders of `gradcam batch` that are named are listed on the left.
    Everything that is done there can be copied as a command. It needs the extra `ui`: pip install "gradcam-torch[ui]"

    \b
      gradcam ui
      gradcam ui photos/ --model timm:resnet50
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
            raise GradcamError('gradcam ui needs starlette and uvicorn: pip install "gradcam-torch[ui]"') from error
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
            f"Warning: at {host} other machines can reach this page, and whoever has the address can use it.", err=True
        )
    is_everywhere = host in EVERYWHERE
    page = f"http://{_to_name(HERE if is_everywhere else host)}:{port}/"
    elsewhere = find_address() if is_everywhere else None
    click.echo(f"{page}?token={server.token}")
    if elsewhere is not None:
        click.echo(f"From other machines: http://{elsewhere}:{port}/?token={server.token}")
    click.echo("Ctrl+C ends it.")
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
            choice = replace(choice, weights=options.to_weights(wanted.weights))
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
                f"gradcam ui is running at port {port} already: use the address that it printed, or give --port 0."
            ) from error
        raise GradcamError(f"{printable(host)}:{port} cannot be taken ({error.strerror}): give --port 0.") from error
    return found


def _is_ours(host: str, port: int) -> bool:
    """Whether another `gradcam ui` answers there."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(HERE if host in ("0.0.0.0", "::") else host, port, timeout=2)
        connection.request("GET", "/alive", headers={"Host": f"{HERE}:{port}"})
        return b"gradcam" in connection.getresponse().read(100)
    return False
