"""Access control of the local page: a request needs the token and a known host and origin, and its size is limited."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import RedirectResponse

from gradcam.ui.refusal import REASONS, make_refusal

TOKEN_HEADER = "x-gradcam-token"
MAX_UPLOAD_BYTES = 200 * 10**6  # Limit for an image that is dropped on the page.
ALIVE_PATH = "/alive"  # Needs no token, so that a second `gradcam ui` can find the first one at a port.
HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-z:.%]+\])(:\d{1,5})?")  # A host name or address, and optionally a port.
LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]")
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}  # fmt: skip


class UploadTooLarge(Exception):
    """The error for a request body that exceeds `MAX_UPLOAD_BYTES`."""


class Guard:
    """ASGI middleware that refuses requests with an unknown host, a foreign origin or no token.

    `hosts` are the host names of the server. Loopback names are also accepted and, if `takes_addresses` is True,
    numeric addresses. Any other host name is a sign of DNS rebinding. `once` is a secret that the browser exchanges for
    the token. The exchange works only once, so the secret is useless to programs that read it later.
    """

    def __init__(
        self, application: Any, *, token: str, once: str | None, hosts: Iterable[str], takes_addresses: bool
    ) -> None:
        self.application, self.token, self.once = application, token, once
        self.hosts, self.takes_addresses = frozenset(map(str.lower, hosts)), takes_addresses

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse the request, redirect it to the page, or pass it to the application."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.application(scope, receive, send)
            return
        request_headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refuse(scope, request_headers)
        if refusal is not None:
            status, reason = refusal
            headers = {**SECURITY_HEADERS, "connection": "close"}
            await make_refusal(scope, request_headers, status, reason, headers)(scope, receive, send)
            return
        if "once" in _parse_query(scope):
            self.once = None
            await RedirectResponse(f"/?token={self.token}", 303, headers=SECURITY_HEADERS)(scope, receive, send)
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self.application(scope, self._limit_body(receive), send_safely)

    def _refuse(self, scope: Any, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "").lower()
        if not self._is_known(host):
            return 403, "Unknown host name: open the address that gradcam ui printed, or give --allow-host NAME."
        if headers.get("origin", "null") != f"http://{headers['host']}" and "origin" in headers:
            return 403, "A request from another page was refused: use the page of gradcam ui."
        if scope["path"] == ALIVE_PATH:
            return None
        query = _parse_query(scope)
        if "once" in query:
            is_known = _matches(query["once"], self.once)
            reason = REASONS["once"]
        else:
            is_known = _matches(headers.get(TOKEN_HEADER) or query.get("token", ""), self.token)
            reason = REASONS["token"]
        if not is_known:
            return 403, reason
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_UPLOAD_BYTES:
            return 413, _describe_limit()
        return None

    def _is_known(self, host: str) -> bool:
        """Return whether a request with this host is accepted.

        In DNS rebinding, the attacker's own domain resolves to this machine, so the browser sends the attacker's domain
        as the host. Loopback names and addresses are safe, because browsers resolve them without DNS. Every port is
        accepted, because `ssh -L 9000:127.0.0.1:8765` changes the port. Pages at other ports of this machine are
        refused because of their origin.
        """
        match = HOST.fullmatch(host)
        name = "" if match is None else match[1]
        is_loopback = LOOPBACK.fullmatch(name) is not None
        return name in self.hosts or is_loopback or (self.takes_addresses and _is_address(name))

    def _limit_body(self, receive: Any) -> Any:
        received_bytes = 0

        async def receive_limited() -> Any:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAX_UPLOAD_BYTES:
                raise UploadTooLarge(_describe_limit())
            return message

        return receive_limited


def _describe_limit() -> str:
    return f"The file is larger than {MAX_UPLOAD_BYTES / 1e6:g} MB, the limit for a dropped file."


def _matches(secret: str, expected: str | None) -> bool:
    return expected is not None and secrets.compare_digest(secret.encode(), expected.encode())


def _parse_query(scope: Any) -> dict[str, str]:
    """Return the query parameters. If a parameter is repeated, return its first value."""
    return {name: values[0] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}


def _is_address(name: str) -> bool:
    """Return whether the name of a host is a numeric address."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
