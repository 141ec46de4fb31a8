"""Test the connections of the local page: incomplete requests end, and cannot lock out a user."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradcam.ui import connections
from gradcam.ui.connections import HEADER_SECONDS, STALL_SECONDS, BoundedServer, find_max_connections
from tests.ui.serving import Serving, serve

resource = pytest.importorskip("resource")

HALF_A_REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Header: "
UPLOAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


# ---- Many incomplete requests


@pytest.fixture
def half_open() -> Iterator[Callable[[Serving, int], list[socket.socket]]]:
    """Open connections that send the start of a request and no more, with as many files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:

        def open_connections(server: Serving, count: int) -> list[socket.socket]:
            if hard != resource.RLIM_INFINITY and hard < count + 100:
                count = 300
            opened = []
            for _ in range(count):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
                with contextlib.suppress(ConnectionError):  # the server may have closed it already
                    connection.sendall(HALF_A_REQUEST)
                opened.append(connection)
            return opened

        yield open_connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def count_open(opened: list[socket.socket]) -> int:
    def is_open(connection: socket.socket) -> bool:
        connection.setblocking(False)
        try:
            return connection.recv(1) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    return sum(map(is_open, opened))


@pytest.mark.parametrize(("count", "max_files", "limit"), [(300, 256, 128), (1000, None, 256)])
def test_half_open_connections_do_not_lock_out_a_user(
    half_open: Callable[..., Any], count: int, max_files: int | None, limit: int
) -> None:
    with serve(max_files=max_files) as server:
        opened = half_open(server, count)
        start = time.monotonic()
        for _ in range(3):
            assert server.ask("strip").status_code == 200
        assert time.monotonic() - start < 3
        assert 0 < count_open(opened) <= limit
        assert count_open(opened[-10:]) == 10, "the oldest connections are closed first"
        assert "Traceback" not in server.read_output()


@pytest.mark.slow
def test_half_open_connections_end_after_10_seconds(half_open: Callable[..., Any]) -> None:
    assert (HEADER_SECONDS, STALL_SECONDS) == (10, 30)
    with serve() as server:
        opened = half_open(server, 20)
        time.sleep(8)
        assert count_open(opened) == 20
        time.sleep(3)
        assert count_open(opened) == 0


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux can change the limit of another process")
def test_the_server_survives_a_lack_of_files(half_open: Callable[..., Any]) -> None:
    with serve() as server:
        server.ask("strip")
        files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (files + 6, 1000))
        half_open(server, 12)
        assert server.ask("strip").status_code == 200
        assert server.read_output().count("\n") <= 1, "the line about Ctrl+C, but no traceback"


def test_the_limit_of_connections_leaves_files_for_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, expected in ((64, 32), (256, 128), (10**6, 256), (resource.RLIM_INFINITY, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert find_max_connections() == expected


# ---- Time limits, with a server in the test process


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a server with short limits. It answers with the length of the body; the path is the delay in seconds."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.8)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        length, is_complete = 0, False
        while not is_complete:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            length += len(message["body"])
            is_complete = not message["more_body"]
        await asyncio.sleep(float(scope["path"][1:] or 0))
        body = b"x" * 10**8 if scope["query_string"] == b"long" else str(length).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    server = BoundedServer(answer, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


@contextlib.contextmanager
def connect(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        yield connection


def wait_for_end(connection: socket.socket, trickle: bytes = b"") -> float:
    """Return the seconds until the server closes the connection. Send `trickle` ten times a second."""
    start = time.monotonic()
    connection.settimeout(0.1)
    while time.monotonic() - start < 5:
        try:
            if not connection.recv(1000):
                return time.monotonic() - start
        except TimeoutError:
            with contextlib.suppress(ConnectionError):
                connection.sendall(trickle)
        except ConnectionError:
            return time.monotonic() - start
    pytest.fail("The server did not close the connection.")


@pytest.mark.parametrize("trickle", [b"", b"a"])
def test_incomplete_headers_end_even_if_single_bytes_arrive(port: int, trickle: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(HALF_A_REQUEST)
        assert 0.3 < wait_for_end(connection, trickle) < 4.5


def test_the_second_request_of_a_connection_has_the_same_time(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /0 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(HALF_A_REQUEST)
        assert wait_for_end(connection, b"a") < 4.5


def test_a_body_that_stalls_ends(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(UPLOAD % 1000)
        for _ in range(3):
            time.sleep(0.1)
            connection.sendall(b"a")
        assert 0.7 < wait_for_end(connection) < 4.5


def test_a_slow_upload_that_makes_progress_goes_on(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(UPLOAD % 25)
        for _ in range(25):  # three times the limit
            time.sleep(0.1)
            connection.sendall(b"a")
        connection.settimeout(10)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.read() == b"25"


def test_a_request_that_waits_for_its_answer_goes_on(port: int) -> None:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    client.request("POST", "/2", body=b"abc")  # more than twice the limit
    assert client.getresponse().read() == b"3"
    client.close()


def test_a_response_that_is_not_read_ends(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /0?long HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.4)
        connection.sendall(b"a")  # the start of another request
        time.sleep(2)
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(10**6):
                received += len(part)
        assert 0 < received < 10**8


def test_a_response_that_is_read_slowly_goes_on(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /0?long HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = 0
        for _ in range(25):  # three times the limit
            time.sleep(0.1)
            received += len(connection.recv(10**6))
        while part := connection.recv(10**6):
            received += len(part)
        assert received > 10**8


def test_a_complete_request_is_not_closed_for_new_connections(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "find_max_connections", lambda: 2)
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    client.request("GET", "/1")
    time.sleep(0.2)  # The server reads the request before it accepts the other connections.
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(port)).sendall(HALF_A_REQUEST)
        assert client.getresponse().read() == b"0"
    client.close()
