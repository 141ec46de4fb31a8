"""Test the access to the local page: host names behind a forwarded port, and names that would run code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from gradcam import plugins
from gradcam.errors import ModelError
from gradcam.ui.explainer import Explainer
from gradcam.ui.guard import TOKEN_HEADER
from gradcam.ui.model_cache import ModelCache
from gradcam.ui.server import Server, find_hosts
from gradcam.ui.strip import ImageStrip
from tests.cli.test_cli import Command, folder, gradcam_command
from tests.cli.test_help import stop_when_ready
from tests.ui.serving import MODELS, Serving, serve

__all__ = ["folder", "gradcam_command"]  # fixtures

RUNS_CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"


# ---- Host names


def find_status(*hosts: str, host: str, origin: str | None = None, **options: Any) -> int:
    def load(request: Any) -> Any:
        raise AssertionError("no model is needed")

    server = Server(Explainer(ModelCache(load), ImageStrip()), "usual")
    web = TestClient(server.to_application(find_hosts("127.0.0.1") | set(hosts), **options))
    headers = {"host": host, TOKEN_HEADER: server.token} | ({} if origin is None else {"origin": origin})
    return web.get("/strip", headers=headers).status_code


FORGED = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost", "127.0.0.1@evil.example",
    "evil.example@127.0.0.1", "127.evil.example", "localhost\\evil.example", "[::1].evil.example", "[::1]evil.example",
    "192.0.2.2", "[2001:db8::1]", "0.0.0.0", "2130706433", "",
]  # fmt: skip


@pytest.mark.parametrize("port", ["", ":8765", ":9000", ":9000:9000", ":", ":x"])
@pytest.mark.parametrize("name", FORGED)
def test_forged_hosts_are_refused(name: str, port: str) -> None:
    assert find_status(host=name + port) == 403
    assert find_status(host=name + port, origin=f"http://{name}{port}") == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5", "[::1]", "LocalHost"])
def test_loopback_names_are_accepted_with_every_port(host: str) -> None:
    for port in ("", ":80", ":8765", ":9000"):
        assert find_status(host=host + port) == 200
        assert find_status(host=host + port, origin=f"http://{host}{port}") == 200
    for origin in ("http://localhost:1", f"http://{host}:8765", "http://evil.example", "null", f"https://{host}:9000"):
        assert find_status(host=f"{host}:9000", origin=origin) == 403


def test_other_names_are_accepted_if_they_are_allowed() -> None:
    for host in ("lab.example", "lab.example:9000", "LAB.example:443"):
        assert find_status(host=host) == 403
        assert find_status("lab.example", host=host) == 200
    for host in ("x.lab.example", "lab.example.evil.example", "evil.example"):
        assert find_status("lab.example", host=host, takes_addresses=True) == 403


@pytest.mark.parametrize("name", ["http://lab.example", "lab.example:80", "", "a b", "*"])
def test_a_name_to_allow_is_a_host_name(gradcam_command: Command, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stop_when_ready(monkeypatch)
    outcome = gradcam_command("ui", "--allow-host", name)
    assert outcome.status == 2
    assert "is not a host name: expected a name without a port" in outcome.err


@contextlib.contextmanager
def forward(port: int) -> Iterator[int]:
    """Forward a port to another, like `ssh -L`; yield the new port."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async def run() -> None:
        async with await asyncio.start_server(connect, sock=listener):
            while not is_over.is_set():
                await asyncio.sleep(0.05)

    listener, is_over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        is_over.set()
        thread.join()


# ---- Names that would run code


@pytest.fixture(scope="module")
def code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the model of the command line, and files that create the file `ran` if their code runs."""
    path = tmp_path_factory.mktemp("code")
    marker = str(path / "ran")
    (path / "mine.py").write_text(MODELS)
    (path / "other.py").write_text(MODELS + RUNS_CODE.format(marker=marker))

    class Runner:
        def __reduce__(self) -> Any:
            return exec, (RUNS_CODE.format(marker=marker),)

    torch.save(Runner(), path / "evil.pt")
    (path / "raw.pth").write_bytes(pickle.dumps(Runner()))
    remote = path / "remote"
    remote.mkdir()
    shutil.copy(path / "other.py", remote / "other.py")
    names = {"AutoConfig": "other.Small", "AutoModelForImageClassification": "other.Small"}
    (remote / "config.json").write_text(json.dumps({"model_type": "other", "auto_map": names}))
    return path


@pytest.fixture(scope="module")
def server(code_folder: Path, photo: Callable[[str], Path]) -> Iterator[Serving]:
    options = ("--model", "mine.py:small", "--allow-host", "Lab.example")
    with serve(*options, str(photo("coffee.jpg")), folder=code_folder) as server:
        yield server


CODE = [
    {"model": "other.py:small"}, {"model": "./other.py:small"}, {"model": "other:small"}, {"model": "other.sub:small"},
    {"other": {"model": "other.py:small"}}, {"method": "other.py:small"}, {"method": "other:small"},
    {"method": "other.py:small", "quick": True}, {"model": "yolo:evil.pt"}, {"other": {"model": "yolo:raw.pth"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", CODE, ids=str)
def test_code_that_is_typed_is_refused(server: Serving, code_folder: Path, fields: dict[str, Any]) -> None:
    error = server.explain(0, **fields)["error"]
    assert "can run code on this machine, so it is refused. Start gradcam ui with --allow-code" in error
    saved = server.ask("save", method="POST", json={"tab": "t", "picture": 0, **fields})
    assert saved.status_code == 422 or "other" in fields, "a saved page has no second model"
    assert not (code_folder / "ran").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": "evil.pt"}, {"weights": "raw.pth"}, {"model": "resnet18", "weights": "evil.pt"},
        {"layer": "other.py:small"},
        {"model": "hf:remote"}, {"model": "timm:remote"}, {"model": "smp:remote"}, {"model": "open_clip:other.py:small"},
        {"edits": ["other.py:small"]}, {"model": "evil.pt"},
    ],
    ids=str,
)  # fmt: skip
def test_no_other_field_runs_code(server: Serving, code_folder: Path, fields: dict[str, Any]) -> None:
    assert server.explain(0, **fields)["error"]
    assert not (code_folder / "ran").exists()


def test_the_model_of_the_command_line_can_be_typed_again(server: Serving) -> None:
    assert server.explain(0, model="mine.py:small")["page"]
    assert server.explain(0, other={"model": "mine.py:small"})["other"]


def test_the_page_works_through_a_forwarded_port_and_forged_hosts_do_not(server: Serving) -> None:
    with forward(server.port) as port:
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"lab.example:{port}"):
            headers = {"host": host, "origin": f"http://{host}", TOKEN_HEADER: server.token}
            address = f"http://127.0.0.1:{port}/ask"
            question = {"tab": "t", "picture": 0}
            assert "page" in httpx.post(address, headers=headers, json=question, trust_env=False, timeout=60).json()
            assert httpx.post(address, headers=headers | {TOKEN_HEADER: ""}, trust_env=False).status_code == 403
        for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example"):
            for host in (name, f"{name}:{port}", f"{name}:{server.port}"):
                for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
                    headers[TOKEN_HEADER] = server.token
                    answer = httpx.get(f"http://127.0.0.1:{port}/", headers=headers, trust_env=False)
                    assert answer.status_code == 403
                    assert server.token not in answer.text


def test_code_that_is_typed_runs_with_allow_code(code_folder: Path, photo: Callable[[str], Path]) -> None:
    with serve("--allow-code", "--model", "mine.py:small", str(photo("coffee.jpg")), folder=code_folder) as server:
        assert "page" in server.explain(0, model="other.py:small")
    assert (code_folder / "ran").exists()
    os.remove(code_folder / "ran")


def test_code_is_refused_only_within_the_context(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("value, second = 1, 2")
    name = f"{tmp_path}/code.py:value"
    with plugins.refuse_new_code("Ask."), pytest.raises(ModelError, match=r"is refused\. Ask\."):
        plugins.load_plugin("models", name)
    assert plugins.load_plugin("models", name) == 1
    with plugins.refuse_new_code("Ask."):
        assert plugins.load_plugin("models", name) == 1
        with pytest.raises(ModelError, match="is refused"):
            plugins.load_plugin("models", f"{tmp_path}/code.py:second")


# ---- The warning


@pytest.mark.parametrize("options", [(), ("--allow-code",)])
def test_the_warning_names_both_risks(
    gradcam_command: Command, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    stop_when_ready(monkeypatch)
    warning = gradcam_command("ui", "--host", "0.0.0.0", "--no-browser", *options).err
    assert "Anyone who has the token can use the page" in warning
    assert ("run any code on this machine" in warning) == bool(options)
    assert ("load model and weight files" in warning) == (not options)
    assert "The traffic is not encrypted" in warning


def test_there_is_no_warning_on_loopback(gradcam_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_when_ready(monkeypatch)
    assert "Warning" not in gradcam_command("ui", "--no-browser").err
