"""Test lists that mix images with addresses that do not answer: no image waits for them, and all are recorded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import gradcam
from gradcam.storage import retry, store
from tests.cli.test_batch import batch
from tests.cli.test_cli import Command, folder, gradcam_command
from tests.conftest import ASSETS

__all__ = ["batch", "folder", "gradcam_command"]  # fixtures

pytest.importorskip("aiohttp")  # fsspec reads http:// with aiohttp.

PHOTOS = ["coffee.jpg", "rocket.jpg", "chelsea.jpg", "cat_and_espresso.jpg"]


class Server(ThreadingHTTPServer):
    """A server that sends its image completely, or truncates it while `is_broken`."""

    is_broken = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        data = (ASSETS / "coffee.jpg").read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:100] if self.server.is_broken and "cut" in self.path else data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def truncating(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, seconds in {"RETRY_SECONDS": 0.6, "SHORT_RETRY_SECONDS": 0.2, "MIN_WAIT_SECONDS": 0.05}.items():
        monkeypatch.setattr(retry, name, seconds)
    monkeypatch.setattr(store, "REQUEST_TIMEOUT_SECONDS", 0.4)
    server = Server()
    yield server
    server.shutdown()
    server.server_close()
    retry._outages.clear()


@pytest.fixture
def dead(truncating: Server) -> Iterator[list[str]]:
    """Return URLs of a server that refuses, of one that truncates its answers, and of one that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as refusing, socket.create_server(("127.0.0.1", 0)) as silent:
        ports = [server.getsockname()[1] for server in (refusing, silent)]
        refusing.close()
        addresses = (f"{ports[0]}/refused", f"{truncating.server_port}/cut", f"{ports[1]}/silent")
        yield [f"http://127.0.0.1:{address}.jpg" for address in addresses]


def write_list(folder: Path, dead: list[str]) -> Path:
    """Write a list in which every image comes after a dead address."""
    local = [str(ASSETS / name) for name in PHOTOS]
    lines = [line for pair in zip(dead, local) for line in pair] + local[len(dead) :]
    path = folder / "list.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("options", [[], ["--batch-size", 1, "--workers", 1]])
def test_images_that_are_there_come_first_and_dead_addresses_are_recorded(
    batch: Command, folder: Path, dead: list[str], truncating: Server, options: list[object]
) -> None:
    path = write_list(folder, dead)
    outcome = batch(path, "-o", "out", "--device", "cpu", *options)
    assert outcome.status == 1
    records = gradcam.read_manifest(folder / "out")
    failed = {record.image.rpartition("/")[2]: record.error for record in records if record.status == "failed"}
    assert len(records) == len(PHOTOS) + len(dead)
    assert set(failed) == {"refused.jpg", "cut.jpg", "silent.jpg"}
    assert "Connect call failed" in str(failed["refused.jpg"])
    assert "payload is not completed" in str(failed["cut.jpg"])
    assert "the time limit was reached" in str(failed["silent.jpg"])
    assert all("http" not in str(reason) for reason in failed.values())
    assert [record.status for record in records] == ["ok"] * len(PHOTOS) + ["failed"] * len(dead)
    truncating.is_broken = False
    retry._outages.clear()
    outcome = batch(path, "-o", "out", "--device", "cpu", "--resume", *options)
    assert outcome.status == 1
    last = {record.image.rpartition("/")[2]: record.status for record in gradcam.read_manifest(folder / "out")}
    assert [last[name] for name in ("refused.jpg", "cut.jpg", "silent.jpg")] == ["failed", "ok", "failed"]


def test_one_broken_object_does_not_condemn_its_host(batch: Command, folder: Path, truncating: Server) -> None:
    host = f"http://127.0.0.1:{truncating.server_port}"
    (folder / "list.txt").write_text("\n".join(f"{host}/{name}.jpg" for name in ("cut", "a", "b", "c", "d")))
    outcome = batch("list.txt", "-o", "out", "--batch-size", 2)
    assert outcome.status == 1
    statuses = {record.image.rpartition("/")[2]: record.status for record in gradcam.read_manifest(folder / "out")}
    assert statuses == {"cut.jpg": "failed"} | dict.fromkeys(["a.jpg", "b.jpg", "c.jpg", "d.jpg"], "ok")


def test_a_store_that_recovers_is_read_in_the_end(truncating: Server, caplog: pytest.LogCaptureFixture) -> None:
    host = f"http://127.0.0.1:{truncating.server_port}"
    results = gradcam.explain_files([f"{host}/cut.jpg", ASSETS / "rocket.jpg"], workers=2)
    assert next(results).path == ASSETS / "rocket.jpg"
    truncating.is_broken = False
    (last,) = results
    assert (last.name.rpartition("/")[2], last.error) == ("cut.jpg", None)
    assert "Reading 1 image(s) again" in caplog.text


def test_values_do_not_depend_on_an_outage(batch: Command, folder: Path, truncating: Server) -> None:
    """Check that an image that is read late is explained in the batch that it would have been in."""
    path = write_list(folder, [f"http://127.0.0.1:{truncating.server_port}/cut.jpg"])
    batch(path, "-o", "late", "--max-failures", 0)
    retry._outages.clear()
    truncating.is_broken = False
    batch(path, "-o", "late", "--resume")
    batch(path, "-o", "whole")
    manifests = [gradcam.read_manifest(folder / name) for name in ("late", "whole")]
    late, full = ({record.image: record for record in records} for records in manifests)
    name = next(name for name in full if name.endswith("cut.jpg"))
    assert late[name] == full[name]
