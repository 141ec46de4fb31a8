"""Who may ask: whoever has the token, from this page, by this server's own name; and how much they may send."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse

HEADER = "x-gradcam-token"
LARGEST = 200 * 10**6  # bytes of a picture that is dropped
OPEN = "/alive"  # what a second `gradcam ui` asks
SAFE = {
    "x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}  # fmt: skip


class TooLarge(Exception):
    """More was sent than is allowed."""


class Guard:
    """Around an application: it hears of nothing that has a foreign host, a foreign origin or no token.

    `hosts`: the names, with the port, by which the server may be called: another one is a page whose name was made to
    lead here (DNS rebinding)."""

    def __init__(self, application: Any, *, token: str, hosts: Iterable[str], largest: int = LARGEST) -> None:
        self.application, self.token, self.hosts, self.largest = application, token, frozenset(hosts), largest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or let the application answer."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.application(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refuse(scope, headers)
        if refusal is not None:
            status, reason = refusal
            await JSONResponse({"error": reason}, status, headers={**SAFE, "connection": "close"})(scope, receive, send)
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in SAFE.items())]
            await send(message)

        await self.application(scope, self._limit(receive), send_safely)

    def _refuse(self, scope: Any, headers: dict[str, str]) -> tuple[int, str] | None:
        if headers.get("host") not in self.hosts:
            return 403, "This server is called by another name: open the address that gradcam ui printed."
        if headers.get("origin", "null") != f"http://{headers['host']}" and "origin" in headers:
            return 403, "Another page asked: only the page of gradcam ui may."
        if scope["path"] == OPEN:
            return None
        given = headers.get(HEADER) or parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return 403, "The token is missing or of another gradcam ui: open the address that it printed."
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.largest:
            return 413, self._say_limit()
        return None

    def _limit(self, receive: Any) -> Any:
        count = 0

        async def receive_some() -> Any:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.largest:
                raise TooLarge(self._say_limit())
            return message

        return receive_some

    def _say_limit(self) -> str:
        return f"The file has more than {self.largest / 1e6:g} MB, which is the most that is taken here."
