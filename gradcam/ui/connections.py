"""HTTP connections with a limit on their number, and with time limits for clients that send or read too slowly.

uvicorn's own settings do not suffice. `timeout_keep_alive` starts only after a response. `limit_concurrency` is checked
only after all headers have arrived. `h11_max_incomplete_event_size` limits only the length of the headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # Time for all headers to arrive, from the start of a connection or the end of a response.
STALL_SECONDS = 30.0  # Time in which a part of a request's body has to arrive, or a part of a response has to be read.
MAX_CONNECTIONS = 256
ACCEPTS_PER_CYCLE = 4  # Connections that asyncio accepts before `connection_made` can close any connection.
MAX_QUEUED_CONNECTIONS = 1024  # Length of the system's queue of connections that asyncio has not yet accepted.
RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TimedConnection(H11Protocol):
    """A connection that is closed if its request stops arriving, or if the client stops reading the response.

    There is no time limit for the server's response to a request. `client_state` is the client's state in h11 at the
    last event. `timer_start` is the time of the last progress.
    """

    timer: asyncio.TimerHandle | None = None
    timer_start = 0.0
    client_state: Any = None

    @property
    def has_request(self) -> bool:
        """Return whether the server is responding to a complete request."""
        is_complete = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        return is_complete or self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the headers. If there are too many connections, close the oldest idle connection."""
        super().connection_made(transport)
        self._update_timer()
        close_connections(self.connections, find_max_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._set_timer(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process the data, and update the timer."""
        super().data_received(data)
        self._update_timer()

    def pause_writing(self) -> None:
        """Start the timer when the buffer is full and the client has to read a part of the response."""
        super().pause_writing()
        self._set_timer(STALL_SECONDS)

    def resume_writing(self) -> None:
        """Stop the timer for reading, because the client has read most of the buffered response."""
        super().resume_writing()
        self._set_timer(None)
        self._update_timer()

    def _update_timer(self) -> None:
        """Restart the timer if the request made progress. Further bytes of incomplete headers are no progress."""
        previous_state, self.client_state = self.client_state, self.conn.their_state
        if self.flow.write_paused:
            return
        if self.client_state is h11.SEND_BODY:
            self._set_timer(STALL_SECONDS)
        elif self.client_state is not h11.IDLE:
            self._set_timer(None)
        elif previous_state is not h11.IDLE or self.timer is None:
            self._set_timer(HEADER_SECONDS)

    def _set_timer(self, seconds: float | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.timer_start = None, self.loop.time()
        if seconds is not None:
            self.timer = self.loop.call_later(seconds, self._end, self.transport.get_write_buffer_size())

    def _end(self, previous_size: int) -> None:
        """Close the connection, unless the client has read a part of the buffered response since the timer started."""
        if self.transport.get_write_buffer_size() < previous_size:
            self._set_timer(STALL_SECONDS)
        else:
            self.transport.abort()  # `close` would wait for the client.


class BoundedServer(uvicorn.Server):
    """A uvicorn server that uses `TimedConnection`, and keeps running if there are no file descriptors left."""

    def __init__(self, application: Any, **options: Any) -> None:
        # asyncio accepts `backlog` connections in one cycle. uvicorn's default exceeds the usual limit on open files.
        options |= {"http": TimedConnection, "loop": "asyncio", "backlog": ACCEPTS_PER_CYCLE}
        super().__init__(uvicorn.Config(application, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._handle_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(MAX_QUEUED_CONNECTIONS)  # Replaces the queue length that asyncio set to `backlog`.

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Close connections if asyncio could not accept a new one for lack of resources. Report all other errors."""
        if "socket" not in context or getattr(context.get("exception"), "errno", None) not in RESOURCE_ERRORS:
            loop.default_exception_handler(context)
            return
        close_connections(self.server_state.connections, len(self.server_state.connections) // 2)


def close_connections(connections: set[Any], limit: int) -> None:
    """Close connections without a complete request, those with the oldest progress first, until `limit` are open."""
    open_connections = [connection for connection in connections if not connection.transport.is_closing()]
    incomplete = [connection for connection in open_connections if not connection.has_request]
    for connection in sorted(incomplete, key=lambda item: item.timer_start)[: max(0, len(open_connections) - limit)]:
        connection.transport.abort()


def find_max_connections() -> int:
    """Return the limit on connections: at most half of the file descriptors, because models also open files."""
    with contextlib.suppress(ImportError):  # Windows has neither the module nor the limit.
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            return min(MAX_CONNECTIONS, files // 2)
    return MAX_CONNECTIONS
