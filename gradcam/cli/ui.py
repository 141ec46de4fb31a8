"""`gradcam ui`: serve a local page that explains the images dropped on it."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli._commands import Command, to_weights
from gradcam.cli._completion import list_models
from gradcam.cli._job import load_model, print_notes
from gradcam.cli._page_maker import to_code
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice
from gradcam.cli._terminal import TerminationSignal, acknowledge_signals, import_torch
from gradcam.errors import GradcamError, escape_controls, to_pip_command
from gradcam.plugins import list_entry_points, refuse_new_code

if TYPE_CHECKING:
    from gradcam.ui.jobs import JobQueue
    from gradcam.ui.model_cache import LoadedModel, ModelRequest

LOCALHOST = "127.0.0.1"
DEFAULT_PORT = 8765
HOW_TO_ALLOW = "Start gradcam ui with --allow-code, or pass this name to --model when you start it."


def _to_host_name(text: str) -> str:
    """Return the host name in lower case, as browsers send it. Raise `GradcamError` for a port or another text."""
    if not re.fullmatch(r"[\w.-]+", text, re.ASCII):
        raise GradcamError(f"{text!r} is not a host name: expected a name without a port, such as server.example.org.")
    return text.lower()


@click.command("ui", cls=Command)
@click.argument("places", nargs=-1, metavar="[IMAGE|FOLDER]...", type=click.Path(path_type=Path))
@options.model
@options.option("--port N", "Port of the page. 0: any free port.", options.integer(0, 65535), default=DEFAULT_PORT)
@options.option(
    "--host ADDRESS",
    "Network address. With an address other than 127.0.0.1, other machines can connect if they know the printed token.",
    default=LOCALHOST,
)
@options.option(
    "--allow-host NAME",
    "Another host name at which the page may be opened; may be repeated. localhost and 127.0.0.1 are always allowed.",
    _to_host_name,
    multiple=True,
)
@click.option(
    "--allow-code",
    is_flag=True,
    help="Allow names typed in the page to run code: FILE.py:NAME, MODULE:NAME and yolo:FILE.pt.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser; only print the address.")
def ui_command(
    places: tuple[Path, ...],
    *,
    port: int,
    host: str,
    allow_host: tuple[str, ...],
    allow_code: bool,
    no_browser: bool,
    **params: Any,
) -> int:
    """Explain images interactively: a local page in your browser.

    Drop images on the page, and choose a model, layer, method and class: the heatmap is updated at once. If you brush over
    a part of the image, or move a window over it, the scores and the heatmap are computed without this part. You can
    compare two models, or two checkpoints of one model. You can copy a command that repeats your steps, or save the heatmap
    as an HTML page.

    Arguments can be images, folders, and output folders of `gradcam batch`. The page lists all images at the bottom. If
    this command runs on another machine, type `ssh -L 8765:127.0.0.1:8765 MACHINE` on your own machine, and open the
    printed address on your own machine. This command needs two more packages:

    \b
      pip install starlette uvicorn
    """
    sockets = [_bind(host, port)]
    port = sockets[0].getsockname()[1]
    try:
        import uvicorn  # noqa: F401  (raises if it is not installed)

        import_torch()
        from gradcam.models.preprocess import to_reading
        from gradcam.models.providers import DEFAULT_MODEL
        from gradcam.ui.explainer import Explainer
        from gradcam.ui.jobs import stop_between_modules
        from gradcam.ui.model_cache import ModelCache, ModelRequest
        from gradcam.ui.server import WILDCARD_HOSTS, Server, find_address, find_hosts
        from gradcam.ui.strip import ImageStrip, list_images
    except ImportError as error:
        if error.name in ("uvicorn", "starlette"):
            raise GradcamError(f"gradcam ui needs starlette and uvicorn: {to_pip_command('ui')}") from error
        raise
    files = list_images(places)
    default_choice = replace(to_model_choice(params), task="auto")
    models = ModelCache(lambda request: _load(default_choice, params["reshape"], request))
    classifier = models.get(ModelRequest()).classifier
    print_notes(classifier.notes, OutputMode(as_json=False, quiet=False))
    reader = classifier.reader
    explainer = Explainer(models, ImageStrip(files, lambda source: to_reading(source, reader).picture))
    explainer.warm_up()
    names = [*list_models(click.get_current_context()), *list_entry_points("models")]
    server = Server(explainer, default_choice.model or DEFAULT_MODEL, names)
    address = sockets[0].getsockname()[0].partition("%")[0]
    if not ipaddress.ip_address(address).is_loopback:
        click.echo(_warn_of_network(host, allow_code), err=True)
    is_wildcard = host in WILDCARD_HOSTS
    name = LOCALHOST if is_wildcard else f"[{host}]" if ":" in host else host
    page = f"http://{name}:{port}/"
    network_address = find_address() if is_wildcard else None
    click.echo(f"{page}?token={server.token}")
    if network_address is not None:
        click.echo(f"From other machines: http://{network_address}:{port}/?token={server.token}")
    click.echo("Press Ctrl+C to stop.")
    if not no_browser:
        # Other users of this machine can read the browser's command line, so this secret works only once.
        webbrowser.open(f"{page}?once={server.once}")
    application = server.to_application(find_hosts(host) | set(allow_host), takes_addresses=is_wildcard)
    guard = contextlib.nullcontext() if allow_code else refuse_new_code(HOW_TO_ALLOW)
    with guard, stop_between_modules():
        return _serve(application, sockets, server.jobs)


def _warn_of_network(host: str, allow_code: bool) -> str:
    access = "run any code on this machine" if allow_code else "load model and weight files of this machine"
    return (
        f"Warning: with --host {escape_controls(host)}, other machines can connect. (1) Anyone who has the token can use "
        f"the page, see its images, and {access}. (2) The traffic is not encrypted, so others in the network can read "
        "the token. Safer: leave out --host, and connect with ssh -L."
    )


def _serve(application: Any, sockets: list[socket.socket], jobs: JobQueue) -> int:
    """Serve until a signal arrives, stop all jobs, and return the exit status."""
    from gradcam.ui.connections import BoundedServer

    options: Any = {"log_level": "error", "lifespan": "off", "access_log": False, "ws": "none"}

    class JobStoppingServer(BoundedServer):
        def handle_exit(self, sig: int, frame: Any) -> None:
            jobs.stop()  # Otherwise, uvicorn would wait for the responses of the jobs.
            super().handle_exit(sig, frame)

    status = 0
    try:
        JobStoppingServer(application, **options, timeout_graceful_shutdown=2).run(sockets=sockets)
    except KeyboardInterrupt:
        pass
    except TerminationSignal as error:
        status = error.status
    acknowledge_signals()
    if not jobs.close():  # At a usual exit, Python would wait for the thread that still runs a job.
        sys.stdout.flush()
        os._exit(status)
    return status


def _load(default_choice: ModelChoice, reshape: Any, request: ModelRequest) -> LoadedModel:
    """Load a model for the page. For models other than --model, only --device and --precision apply."""
    from gradcam.models.providers import DEFAULT_MODEL
    from gradcam.ui.model_cache import LoadedModel

    is_default = request.model in (None, default_choice.model or DEFAULT_MODEL)
    shared: Any = {"device": default_choice.device, "precision": default_choice.precision}
    choice = default_choice if is_default else ModelChoice(request.model, **shared, task="auto")
    try:
        if request.weights is not None:
            choice = replace(choice, weights=to_weights(request.weights))
        classifier = load_model(replace(choice, prompts=request.texts))
    except click.UsageError as error:
        raise GradcamError(error.message) from error
    public_choice = replace(choice, task=None)
    code = to_code(public_choice, is_class=classifier.task == "classification")
    return LoadedModel(classifier, tuple(public_choice.to_words()), code, reshape if is_default else None)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if _is_gradcam_ui(host, port):
            problem = f"gradcam ui is already running on port {port}"
            raise GradcamError(f"{problem}: use the address that it printed, or give --port 0.") from error
        problem = f"{escape_controls(host)}:{port} cannot be used ({error.strerror})"
        raise GradcamError(f"{problem}: give --port 0 for a free port.") from error
    return listener


def _is_gradcam_ui(host: str, port: int) -> bool:
    """Return whether another `gradcam ui` responds at this address."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(LOCALHOST if host in ("0.0.0.0", "::") else host, port, timeout=2)
        connection.request("GET", "/alive", headers={"Host": f"{LOCALHOST}:{port}"})
        return b"gradcam" in connection.getresponse().read(100)
    return False
