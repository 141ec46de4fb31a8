"""A local server for the S3 protocol, with a bucket per test."""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from gradcam.storage import retry as failures

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
_numbers = itertools.count(1)


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Start the server, and yield its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # The server would log a line per request.
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def client(kind: str, address: str, **keys: str) -> Any:
    """Return a boto3 client, which shares no code with fsspec."""
    import boto3

    credentials = {"aws_access_key_id": "test", "aws_secret_access_key": "test", **keys}
    return boto3.client(kind, endpoint_url=address, region_name="us-east-1", **credentials)


@contextlib.contextmanager
def bucket(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a bucket, set the environment variables to reach it, and return its URL."""
    import s3fs

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    name = f"bucket-{next(_numbers)}"
    client("s3", address).create_bucket(Bucket=name)
    s3fs.S3FileSystem.clear_instance_cache()
    yield f"s3://{name}"
    failures._outages.clear()
    s3fs.S3FileSystem.clear_instance_cache()
