"""The server of the local page."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from gradcam._version import __version__
from gradcam.errors import GradcamError, describe_unexpected
from gradcam.ui.answers import Answers, Question
from gradcam.ui.guard import LARGEST, OPEN, Guard, TooLarge
from gradcam.ui.jobs import Jobs, Stopped
from gradcam.web.page import COLORMAPS, STYLES, to_table
from gradcam.web.render import render_whole

SCRIPTS = {"script": ("theme.js",), "own": ("common.js", "maps.js", "page.js", "ask.js", "cover.js", "ui.js")}


@dataclass(frozen=True)
class Start:
    """What the page is opened with."""

    model: str
    largest: int = LARGEST


class Server:
    """Pages, and what they ask."""

    def __init__(self, answers: Answers, start: Start) -> None:
        self.answers, self.start, self.jobs = answers, start, Jobs()
        self.token, self.once = secrets.token_urlsafe(24), secrets.token_urlsafe(24)

    def to_application(self, hosts: set[str], *, takes_addresses: bool = False) -> Any:
        """The application; `hosts` and `takes_addresses`: by which names it may be called, as in `Guard`."""
        routes = [
            Route("/", self.show),
            Route(OPEN, self.tell_alive),
            Route("/strip", self.list_strip),
            Route("/view/{number:int}", self.view),
            Route("/drop", self.drop, methods=["POST"]),
            Route("/ask", self.ask, methods=["POST"]),
            Route("/progress", self.tell_progress),
        ]
        handlers: Any = {
            GradcamError: _tell_error,
            TooLarge: _tell_large,
            Stopped: _tell_stopped,
            ClientDisconnect: _tell_stopped,
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        given: Any = {"token": self.token, "once": self.once, "largest": self.start.largest}
        return Guard(application, hosts=hosts, takes_addresses=takes_addresses, **given)

    async def show(self, request: Request) -> Response:
        """The page."""
        start = {
            "token": self.token, "largest": self.start.largest, "model": self.start.model, "version": __version__,
        }  # fmt: skip
        tables = {name: to_table(name) for name in COLORMAPS}
        return HTMLResponse(
            render_whole(
                "ui.html.j2",
                styles=(*STYLES, "ui.css"),
                scripts=SCRIPTS,
                title="gradcam ui",
                start=start,
                tables=tables,
            )
        )

    async def tell_alive(self, request: Request) -> Response:
        """That this is a `gradcam ui`, and no more."""
        return JSONResponse({"gradcam": "ui"})

    async def list_strip(self, request: Request) -> Response:
        """The pictures."""
        return JSONResponse(self.answers.pictures.to_data())

    async def view(self, request: Request) -> Response:
        """A small picture."""
        data = await run_in_threadpool(self.answers.pictures.view, request.path_params["number"])
        return Response(data, media_type="image/jpeg")

    async def drop(self, request: Request) -> Response:
        """Take a picture."""
        data = await request.body()
        name = unquote(request.headers.get("x-name", "picture"))
        number = await run_in_threadpool(self.answers.pictures.add, name, data)
        return JSONResponse({"id": number, "name": self.answers.pictures.get(number).name})

    async def ask(self, request: Request) -> Response:
        """Explain a picture."""
        try:
            asked = json.loads(await request.body())
            tab = str(asked["tab"])[:100]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise GradcamError("The page sent an invalid request: reload the page.") from None
        question = Question.of(asked)

        def work(progress: Callable[[int, int], None]) -> dict[str, Any]:
            try:
                return self.answers.answer(question, progress)
            except (GradcamError, Stopped):
                raise
            except (Exception, SystemExit) as error:  # of a model of the user's; the server goes on
                raise GradcamError(f"The model failed: {describe_unexpected(error)}") from error

        return JSONResponse(await self.jobs.run(tab, work, request.is_disconnected))

    async def tell_progress(self, request: Request) -> Response:
        """How far a tab's question is."""
        done, total = self.jobs.progress(request.query_params.get("tab", ""))
        return JSONResponse({"done": done, "total": total})


def _tell_error(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 422)


def _tell_large(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 413, headers={"connection": "close"})


def _tell_stopped(request: Request, error: Exception) -> Response:
    return JSONResponse({"stopped": True})


EVERYWHERE = ("0.0.0.0", "::")  # where a server listens at all addresses of its machine


def find_hosts(host: str, port: int) -> set[str]:
    """The names by which a server at this address is called."""
    names = {"127.0.0.1", "localhost", f"[{host}]" if ":" in host else host}
    if host in EVERYWHERE:
        names |= {socket.gethostname(), socket.getfqdn()}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())  # which browsers leave out


def find_address() -> str | None:
    """The address by which other machines reach this one; None without a network."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # which sends nothing: it finds the way there
        return str(probe.getsockname()[0])
    return None
