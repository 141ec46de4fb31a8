"""Who may ask: whoever has the token, from this page, by this server's own name; and how much they may send."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.responses import JSONResponse, RedirectResponse

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
    lead here (DNS rebinding). `takes_addresses`: also by any address in numbers, which cannot be made to. `once`: what
    leads to the token a single time, and may be read by others after that."""

    def __init__(
        self,
        application: Any,
        *,
        token: str,
        hosts: Iterable[str],
        takes_addresses: bool = False,
        once: str | None = None,
        largest: int = LARGEST,
    ) -> None:
        self.application, self.token, self.once, self.largest = application, token, once, largest
        self.hosts, self.takes_addresses = frozenset(map(str.lower, hosts)), takes_addresses

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
        if "once" in _query(scope):
            self.once = None
            await RedirectResponse(f"/?token={self.token}", 303, headers=SAFE)(scope, receive, send)
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in SAFE.items())]
            await send(message)

        await self.application(scope, self._limit(receive), send_safely)

    def _refuse(self, scope: Any, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "").lower()
        if host not in self.hosts and not (self.takes_addresses and _is_address(host)):
            return 403, "Unknown host name: open the address that gradcam ui printed."
        if headers.get("origin", "null") != f"http://{headers['host']}" and "origin" in headers:
            return 403, "Request from another page refused: use the page of gradcam ui."
        if scope["path"] == OPEN:
            return None
        query = _query(scope)
        if "once" in query:
            is_known = _is_same(query["once"], self.once)
            reason = "This address works only once: open the address that gradcam ui printed."
        else:
            is_known = _is_same(headers.get(HEADER) or query.get("token", ""), self.token)
            reason = "The token is missing or wrong: open the address that gradcam ui printed."
        if not is_known:
            return 403, reason
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
        return f"The file is larger than {self.largest / 1e6:g} MB, the limit for a dropped file."


def _is_same(given: str, own: str | None) -> bool:
    return own is not None and secrets.compare_digest(given.encode(), own.encode())


def _query(scope: Any) -> dict[str, str]:
    """What is behind the question mark; of a name that comes more than once, the first."""
    return {name: values[0] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}


def _is_address(host: str) -> bool:
    """Whether a host, with its port or without, is an address in numbers."""
    try:
        ipaddress.ip_address(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
    return True
