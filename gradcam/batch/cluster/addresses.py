"""Where a Ray cluster is, looked into before Ray is: to an address that does not answer, Ray would hold on for minutes."""

from __future__ import annotations

import re
import socket

from gradcam.errors import ClusterError, shorten

SECONDS = 10  # to wait for an answer


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
        raise ClusterError(f"--ray-address is {shorten(address)}, expected HOST:PORT, such as 10.0.0.1:6379, or auto.")
    try:
        socket.create_connection((found[1], int(found[2])), timeout=SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ClusterError(
            f"{address}: nothing answers there ({reason.lower()}): is the head up, started with `ray start --head`?"
        ) from error
