"""Where a Ray cluster is, looked into before Ray is: to an address that does not answer, Ray would hold on for minutes."""

from __future__ import annotations

import re
import socket

from gradcam.errors import ClusterError, shorten

SECONDS = 10  # to wait for an answer
SETTINGS = 4  # the kind of the first frame that each side of HTTP/2, which is below gRPC, sends
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])


def check_address(address: str) -> None:
    """Raises `ClusterError` for an address that is none, or that nobody answers at."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        raise ClusterError(
            f"{address}: is of Ray's client, which cannot do this. Give HOST:PORT of the head, such as 10.0.0.1:6379, on a "
            "machine of the cluster; or send the whole command there with `ray job submit`."
        )
    found = re.fullmatch(r"\[?([^\s/]+?)\]?:(\d{1,5})", address)
    if found is None:
        raise ClusterError(
            f"The address of Ray is {shorten(address)}, expected HOST:PORT, such as 10.0.0.1:6379, or auto."
        )
    try:
        speaks = _speaks_grpc(found[1], int(found[2]))
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
        raise ClusterError(
            f"{address}: nothing answers there ({reason}): is the head up, started with `ray start --head`?"
        ) from error
    if not speaks:
        raise ClusterError(
            f"{address}: what answers there is not Ray: give the port of the head, which usually is 6379."
        )


def _speaks_grpc(host: str, port: int) -> bool:
    """Whether what is there speaks as the head does. Raises `OSError` where nobody does."""
    with socket.create_connection((host, port), timeout=SECONDS) as connection:
        connection.sendall(GREETING)
        try:
            return len(answer := connection.recv(9)) == 9 and answer[3] == SETTINGS
        except ConnectionError:  # it did not like that
            return False
