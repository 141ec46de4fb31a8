"""Helpers: a running `gradcam ui`, models with errors, and files that are not valid images."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

HOSTILE = "<img src=x onerror=alert(1)>"
MODELS = f'''
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 8, 16, stride=16)
        self.head = nn.Linear(8, 3)
        self.scale = scale

    def forward(self, images):
        return self.head(self.layer(images).relu().mean((2, 3))) * self.scale

def small():
    model = Small(1.0)
    model.labels = ["cat", "{HOSTILE}", "</script><script>alert(2)</script>"]
    return model

def nan():
    return Small(float("nan"))
'''


@dataclass
class Serving:
    address: str
    process: Any
    lines: list[str]

    @property
    def base(self) -> str:
        return self.address.partition("/?")[0]

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def read_output(self) -> str:
        """Return what the server has printed since its address."""
        descriptor = self.process.stdout.fileno()
        os.set_blocking(descriptor, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(descriptor, 10**6).decode()
        return ""

    def ask(self, path: str, **options: Any) -> httpx.Response:
        headers = {"x-gradcam-token": self.token} | options.pop("headers", {})
        return httpx.request(
            options.pop("method", "GET"), f"{self.base}/{path}", headers=headers, timeout=60, trust_env=False, **options
        )

    def drop(self, name: str, data: bytes) -> httpx.Response:
        return self.ask("drop", method="POST", content=data, headers={"x-name": name})

    def explain(self, picture: int, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask("ask", method="POST", json={"tab": "t", "picture": picture, **options}).json()
        return answer


@contextlib.contextmanager
def serve(*words: str, folder: Path | None = None, max_files: int | None = None) -> Iterator[Serving]:
    command = [sys.executable, "-m", "gradcam", "ui", "--no-browser", "--port", "0", *words]
    if max_files is not None:
        command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(max_files), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parent.parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **pipes) as process:
        lines: list[str] = []
        try:
            for line in process.stdout:  # type: ignore[union-attr]
                lines.append(line)
                if re.match(r"http://\S+token=\S+$", line):
                    break
            assert lines, "it ended"
            assert lines[-1].startswith("http"), "".join(lines)
            yield Serving(lines[-1].strip(), process, lines)
            assert process.poll() is None, "the server ended"
        finally:
            process.terminate()


def make_bomb(side: int = 60_000) -> bytes:
    """Return a PNG that declares this many pixels per side and contains almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
