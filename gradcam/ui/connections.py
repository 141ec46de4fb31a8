"""The HTTP connections of the local page, with limits on their number and on the time for a request to arrive.

uvicorn has no such limits. Its `timeout_keep_alive` starts after a response, its `limit_concurrency` is checked after all
headers have arrived, and its `h11_max_incomplete_event_size` limits the length of the headers.
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

HEADER_SECONDS = 10.0  # from the start of a connection, or from the previous response, until all headers have arrived
STALL_SECONDS = 30.0  # without progress of a request's body or of a response
MAX_CONNECTIONS = 256
ACCEPTS_PER_CYCLE = 4  # asyncio accepts so many connections before `connection_made` is called for the first of them
MAX_QUEUED_CONNECTIONS = 1024  # connections that the system completes before asyncio accepts them
RESOURCE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TimedConnection(H11Protocol):
    """A connection that is closed if its request stops arriving, or if the client stops reading the response.

    While a request waits for its response, there is no time limit. `client_state` is the client's state at the last
    event, and `timer_start` the time of the last progress.
    """

    timer: asyncio.TimerHandle | None = None
    timer_start = 0.0
    client_state: Any = None

    @property
    def has_request(self) -> bool:
        """Return whether a complete request has arrived, and its response is not yet sent."""
        is_complete = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        return is_complete or self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: Any) -> None:
        """Start the time for the headers, and close another connection if there are too many."""
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
        """Start the time for the client to read some of the response."""
        super().pause_writing()
        self._set_timer(STALL_SECONDS)

    def resume_writing(self) -> None:
        """Stop this time, because the client has read most of the buffered response."""
        super().resume_writing()
        self._set_timer(None)
        self._update_timer()

    def _update_timer(self) -> None:
        """Restart the timer if the request made progress. Bytes of incomplete headers do not count as progress."""
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
            self.transport.abort()  # `close` would wait until the client has read the response.


class BoundedServer(uvicorn.Server):
    """A uvicorn server whose connections are `TimedConnection`s, and that survives a lack of file descriptors."""

    def __init__(self, application: Any, **options: Any) -> None:
        # With uvicorn's larger backlog, asyncio would accept more connections in one cycle than files may be open.
        options |= {"http": TimedConnection, "loop": "asyncio", "backlog": ACCEPTS_PER_CYCLE}
        super().__init__(uvicorn.Config(application, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._handle_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(MAX_QUEUED_CONNECTIONS)  # asyncio has set the length of the queue to its own backlog.

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Close half of the connections if asyncio could not accept one, and let it retry. Report other errors."""
        if "socket" not in context or getattr(context.get("exception"), "errno", None) not in RESOURCE_ERRORS:
            loop.default_exception_handler(context)
            return
        close_connections(self.server_state.connections, len(self.server_state.connections) // 2)


def close_connections(connections: set[Any], limit: int) -> None:
    """Close connections until `limit` are left: those without a complete request, by the time of their last progress."""
    open_connections = [connection for connection in connections if not connection.transport.is_closing()]
    incomplete = [connection for connection in open_connections if not connection.has_request]
    for connection in sorted(incomplete, key=lambda item: item.timer_start)[: max(0, len(open_connections) - limit)]:
        connection.transport.abort()


def find_max_connections() -> int:
    """Return the limit on connections: half of the files that this process may open, as models need files too."""
    with contextlib.suppress(ImportError):  # Windows has no such module and no such limit.
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            return min(MAX_CONNECTIONS, files // 2)
    return MAX_CONNECTIONS
