"""`gradcam batch -o URL` and `gradcam report URL`: the same results as on a disk, whatever the store does meanwhile."""

from __future__ import annotations

import errno
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gradcam
from gradcam.batch import store_results
from gradcam.cli.interruption import Terminated
from gradcam.stores import Store, failures
from tests.s3 import client
from tests.stores import ObjectStore, down, objects
from tests.test_cli import POSIX, Command, Outcome, files, folder, gradcam_command
from tests.test_cli_batch import ORDER, batch, photos

__all__ = ["batch", "folder", "gradcam_command", "photos"]  # fixtures

URL = "objects://bucket/out"


@pytest.fixture
def fs() -> Iterator[type[ObjectStore]]:
    with objects() as found:
        yield found


def read_all(url: str) -> dict[str, bytes]:
    """All objects that must be the same however often a run was stopped."""
    store = Store(url)
    return {name: store.read(name) for name in store.find() if not name.startswith("log")}


def on_disk(folder: Path) -> dict[str, bytes]:
    """What a run on a disk left, by the names that it has in a store."""
    found = {name: (folder / name).read_bytes() for name in files(folder)}
    names = {"manifest.jsonl": "manifest/00001.jsonl"}
    return {names.get(name, name): data for name, data in found.items() if not Path(name).name.startswith(("log", "."))}


def without_root(found: dict[str, bytes]) -> dict[str, Any]:
    """From a store, the input's folder is told by another path."""
    run = json.loads(found["run.json"])
    run.pop("root")
    return {**found, "run.json": run}


# Through s3fs, to a server that speaks the protocol


@pytest.mark.parametrize("options", ["--save overlay --save map --save heatmap --method gradcam --method layercam --report"])
def test_the_same_bytes_as_on_a_disk(batch: Command, folder: Path, photos: Path, s3: str, options: str) -> None:
    there = batch("photos", "-o", f"{s3}/a b/out/", *options.split())
    here = batch("photos", "-o", "out", *options.split())
    assert (there.status, there.err) == (here.status, here.err) == (1, here.err)
    pace = r"\(\d+\.\d s, \d+\.\d pictures a second\)"
    assert re.sub(pace, "", there.out).splitlines() == [
        *re.sub(pace, "", here.out).splitlines()[:1],
        f"  →  {s3}/a b/out/",
        f"  →  {s3}/a b/out/index.html",
    ]
    ours, theirs = without_root(read_all(f"{s3}/a b/out")), without_root(on_disk(folder / "out"))
    assert list(ours) == sorted(theirs)
    assert ours == theirs
    assert gradcam.read_manifest(f"{s3}/a b/out") == gradcam.read_manifest(folder / "out")
