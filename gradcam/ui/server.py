"""The HTTP server of the local page: its routes, and the host names of the server."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from gradcam._version import __version__
from gradcam.errors import GradcamError, describe_unexpected
from gradcam.models.providers import DEFAULT_MODEL
from gradcam.options import Progress
from gradcam.ui.explainer import Explainer, Question
from gradcam.ui.guard import ALIVE_PATH, MAX_UPLOAD_BYTES, Guard, UploadTooLarge
from gradcam.ui.jobs import JobQueue, JobStopped, Result
from gradcam.ui.supported_methods import list_general_methods
from gradcam.web.page import COLORMAPS, HEAD_SCRIPTS, PAGE_SCRIPTS, STYLES, VERBS, encode_colormap
from gradcam.web.render import render_standalone

SCRIPTS = {"script": HEAD_SCRIPTS, "own": (*PAGE_SCRIPTS, "ask.js", "cover.js", "ui.js")}

EXAMPLE = Path(__file__).parent / "cat_and_espresso.jpg"
STARTERS = {
    DEFAULT_MODEL: "included",
    "resnet50": "downloads 98 MB",
    "vit_b_16": "downloads 331 MB",
}


class Server:
    """The request handlers of the page. `token` grants access; `once` is a secret that grants access a single time.

    `model` is the name of the default model. `models` are the model names that the page suggests.
    """

    def __init__(self, explainer: Explainer, model: str, models: Sequence[str] = ()) -> None:
        self.explainer, self.model, self.models, self.jobs = explainer, model, models, JobQueue()
        self.token, self.once = secrets.token_urlsafe(24), secrets.token_urlsafe(24)

    def to_application(self, hosts: set[str], *, takes_addresses: bool = False) -> Any:
        """Return the guarded ASGI application; see `Guard` for `hosts` and `takes_addresses`."""
        routes = [
            Route("/", self.show_page),
            Route(ALIVE_PATH, self.identify),
            Route("/strip", self.list_strip),
            Route("/view/{number:int}", self.show_thumbnail),
            Route("/drop", self.drop, methods=["POST"]),
            Route("/example", self.show_example),
            Route("/example", self.add_example, methods=["POST"]),
            Route("/ask", self.ask, methods=["POST"]),
            Route("/save", self.save, methods=["POST"]),
            Route("/progress", self.show_progress),
        ]
        close = {"connection": "close"}
        handlers: Any = {
            GradcamError: lambda _, error: JSONResponse({"error": str(error)}, 422),
            UploadTooLarge: lambda _, error: JSONResponse({"error": str(error)}, 413, headers=close),
            JobStopped: lambda *_: JSONResponse({"stopped": True}),
            ClientDisconnect: lambda *_: JSONResponse({"stopped": True}),
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        return Guard(application, token=self.token, once=self.once, hosts=hosts, takes_addresses=takes_addresses)

    async def show_page(self, request: Request) -> Response:
        """Return the page."""
        starters = {self.model: "given at the start"} | STARTERS
        page_data = {"token": self.token, "largest": MAX_UPLOAD_BYTES, "model": self.model, "version": __version__}
        page_data |= {"models": self.models, "starters": list(starters.items())[:3], "methods": list_general_methods()}
        tables = {name: encode_colormap(name) for name in COLORMAPS}
        contents: Any = {"title": "gradcam ui", "start": page_data, "tables": tables, "verbs": VERBS}
        contents |= {"headline": ("", "", ""), "facts": "", "rows": (), "source": None, "first_map": None}
        return HTMLResponse(render_standalone("ui.html.j2", styles=(*STYLES, "ui.css"), scripts=SCRIPTS, **contents))

    async def identify(self, request: Request) -> Response:
        """Identify this server as a `gradcam ui`. The response needs no token, so it contains nothing else."""
        # Connections without a token are closed after the response.
        return JSONResponse({"gradcam": "ui"}, headers={"connection": "close"})

    async def list_strip(self, request: Request) -> Response:
        """Return the numbers and names of the images in the strip."""
        return JSONResponse(self.explainer.images.to_data())

    async def show_thumbnail(self, request: Request) -> Response:
        """Return the thumbnail of an image."""
        data = await run_in_threadpool(self.explainer.images.thumbnail, request.path_params["number"])
        return Response(data, media_type="image/jpeg")

    async def drop(self, request: Request) -> Response:
        """Add a dropped image to the strip."""
        data = await request.body()
        name = unquote(request.headers.get("x-name", "picture"))
        number = await run_in_threadpool(self.explainer.images.add, name, data)
        return JSONResponse({"id": number, "name": self.explainer.images.get(number).name})

    async def show_example(self, request: Request) -> Response:
        """Return the example image."""
        return Response(EXAMPLE.read_bytes(), media_type="image/jpeg")

    async def add_example(self, request: Request) -> Response:
        """Add the example image to the strip."""
        return JSONResponse({"id": self.explainer.images.add_file(EXAMPLE), "name": EXAMPLE.name})

    async def ask(self, request: Request) -> Response:
        """Answer a question about an image."""
        return JSONResponse(await self._run(request, self.explainer.answer))

    async def save(self, request: Request) -> Response:
        """Return the answer to a question as a standalone HTML page."""
        return HTMLResponse(await self._run(request, self.explainer.save))

    async def _run(self, request: Request, answer: Callable[[Question, Progress], Result]) -> Result:
        """Run a job that answers the question in a request, and return the result."""
        try:
            data = json.loads(await request.body())
            tab = str(data["tab"])[:100]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise GradcamError("The page sent an invalid request: reload the page.") from None
        question = Question.of(data)

        def work(progress: Progress) -> Result:
            try:
                return answer(question, progress)
            except (GradcamError, JobStopped):
                raise
            except (Exception, SystemExit) as error:  # A custom model may raise any error.
                raise GradcamError(f"The model failed: {describe_unexpected(error)}") from error

        return await self.jobs.run(tab, work, request.is_disconnected)

    async def show_progress(self, request: Request) -> Response:
        """Return the progress of a tab's job."""
        completed, total = self.jobs.progress(request.query_params.get("tab", ""))
        return JSONResponse({"done": completed, "total": total, "loading": self.explainer.models.is_loading})


WILDCARD_HOSTS = ("0.0.0.0", "::")  # With these hosts, a server listens at all addresses of its machine.


def find_hosts(host: str) -> set[str]:
    """Return the host names of a server at this address, except loopback names, which are always accepted."""
    machine_names = {socket.gethostname(), socket.getfqdn()} if host in WILDCARD_HOSTS else set[str]()
    return machine_names | {f"[{host}]" if ":" in host else host}


def find_address() -> str | None:
    """Return the network address of this machine; None without a network."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends no packet. It only selects a route, and thereby this machine's address.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None
