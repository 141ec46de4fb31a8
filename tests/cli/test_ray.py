"""Test `gradcam batch --engine ray` with a local Ray, and with a cluster of two small nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.cli.test_batch import tree
from tests.cli.test_cli import Command, Photo, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

PICTURES = 24
LONG_RUN_IMAGES = 72  # Enough to stop the run twice before its end.
BROKEN = "05.jpg"
TIMEOUT_SECONDS = 600  # Ray takes minutes to start on a busy machine.

# Each node has one core, so each actor has one thread. Local runs need one thread as well, to give the same bytes.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"OMP_NUM_THREADS": "1"}
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
cluster.add_node(num_cpus=1, object_store_memory=10**8)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

Batch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, photo: Photo) -> Path:
    """Return a folder with photos/, which has a broken image, and many/, for long runs."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "photos").mkdir()
    (folder / "many").mkdir()
    with Image.open(photo("coffee.jpg")) as opened:
        picture = opened.convert("RGB").resize((320, 240))
    for i in range(PICTURES):
        picture.rotate(7 * i).save(folder / "photos" / f"{i:02}.jpg")
    for i in range(LONG_RUN_IMAGES):
        os.link(folder / "photos" / f"{i % PICTURES:02}.jpg", folder / "many" / f"{i:03}.jpg")
    data = (folder / "photos" / BROKEN).read_bytes()
    (folder / "photos" / BROKEN).unlink()
    (folder / "photos" / BROKEN).write_bytes(data[:2000])
    return folder


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a cluster of two nodes with one core each."""
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = process.stdout.readline().strip()
        while line and ":" not in line:
            line = process.stdout.readline().strip()
        assert line
        yield line
        process.stdin.close()
        process.wait(TIMEOUT_SECONDS)


@pytest.fixture
def batch(workspace: Path) -> Batch:
    """Return a function that runs `gradcam batch` in its own process."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            to_command(*arguments),
            cwd=workspace,
            env=ENVIRONMENT | {"HOME": str(workspace)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    return call


@pytest.fixture
def local(gradcam_command: Command, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Return a function that runs `gradcam batch` without Ray, with as many torch threads as an actor."""
    monkeypatch.chdir(workspace)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *arguments: gradcam_command("batch", "--device", "cpu", *arguments)
    torch.set_num_threads(threads)


def to_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradcam", "batch", "--device", "cpu", *arguments]


@contextlib.contextmanager
def start_batch(workspace: Path, folder: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a batch, and yield its process once ten images are recorded."""
    command = to_command(*arguments, "-o", folder)
    with subprocess.Popen(
        command,
        cwd=workspace,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            until = time.monotonic() + TIMEOUT_SECONDS
            while count(workspace / folder) < 10 and process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            process.kill()


def count(folder: Path) -> int:
    manifest = folder / "manifest.jsonl"
    return manifest.read_text().count("\n") if manifest.exists() else 0


def log(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def results(folder: Path) -> dict[str, bytes]:
    """Return all files except the log. The folder's name, which the report contains, is replaced."""
    return {name: data.replace(folder.name.encode(), b"NAME") for name, data in tree(folder).items()}


def list_leftovers() -> set[Path]:
    return {path for name in ("gradcam-ray-*", "gradcam-run-*") for path in Path("/tmp").glob(name)}


def wait_until_removed(paths: set[Path]) -> bool:
    """Return whether the paths disappear in time. Some may belong to other tests that run in parallel."""
    deadline = time.monotonic() + 60
    while any(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not any(path.exists() for path in paths)


def test_the_same_as_the_local_engine(batch: Batch, local: Command, workspace: Path, address: str) -> None:
    """Compare files, records, output and status, for a Ray that the run starts and for one that it joins."""
    before = list_leftovers()
    alone = local("photos", "-o", "by-local", "--json", "--report")
    assert alone.status == 1
    assert alone.err.startswith(f"{BROKEN}: is damaged or cut off")
    for output, arguments in (("by-own", ()), ("by-joined", ("--ray-address", address))):
        process = batch("photos", "-o", output, "--json", "--report", "--engine", "ray", *arguments)
        assert (process.returncode, process.stdout, process.stderr) == (alone.status, alone.out, alone.err)
        assert results(workspace / output) == results(workspace / "by-local")
        assert len(log(workspace / output, "picture")) == PICTURES
        assert sorted(line["start"] for line in log(workspace / output, "batch")) == [0, 8, 16]
    assert wait_until_removed(list_leftovers() - before)
    assert not (workspace / ".ray").exists()  # A token left there would be required by later clusters.
    # The local engine resumes a run of the Ray engine.
    (workspace / "by-own" / "03-gradcam.jpg").unlink()
    resumed = local("photos", "-o", "by-own", "--json", "--resume", "--report")
    assert [json.loads(line)["image"] for line in resumed.out.splitlines()] == ["03.jpg", BROKEN]
    assert results(workspace / "by-own") == results(workspace / "by-local")


def test_an_actor_that_is_killed(workspace: Path, address: str) -> None:
    """Kill an actor: another one explains its images, and nothing is reported."""
    ray = ("many", "--engine", "ray", "--ray-address", address, "--batch-size", "2", "--json")
    with start_batch(workspace, "killed", *ray) as process:
        victim = log(workspace / "killed", "batch")[0]["actor"]
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert out == (workspace / "killed" / "manifest.jsonl").read_text()
    images = [json.loads(line)["image"] for line in out.splitlines()]
    assert images == [f"{i:03}.jpg" for i in range(LONG_RUN_IMAGES)]
    shares = Counter(line["actor"] for line in log(workspace / "killed", "batch"))
    assert len(shares) == 3
    assert sum(share for actor, share in shares.items() if actor != victim) >= 20


def test_the_driver_killed_and_resumed(batch: Batch, workspace: Path, address: str) -> None:
    """Stop the run by SIGTERM and by SIGKILL: after resuming, every image is recorded exactly once."""
    ray = ("many", "--engine", "ray", "--batch-size", "2")
    joined = (*ray, "--ray-address", address)
    with start_batch(workspace, "stopped", *joined) as process:
        process.terminate()
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 143
    written = {path: path.stat().st_mtime_ns for path in (workspace / "stopped").glob("*.jpg")}
    recorded = count(workspace / "stopped")
    assert err.startswith(
        f"Stopped.\n{recorded} of {LONG_RUN_IMAGES} images are finished. To resume:\n  gradcam batch --resume "
    )
    assert 10 <= recorded <= len(written) < LONG_RUN_IMAGES
    with start_batch(workspace, "stopped", *ray, "--resume") as process:
        while count(workspace / "stopped") < recorded + 10 and process.poll() is None:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    result = {f"{workspace}/stopped/{i:03}-gradcam.jpg" for i in range(recorded)}
    assert {path for path, moment in written.items() if path.stat().st_mtime_ns == moment} >= set(map(Path, result))
    assert recorded < count(workspace / "stopped") < LONG_RUN_IMAGES
    before = len(log(workspace / "stopped", "batch"))
    resumed = batch(*joined, "-o", "stopped", "--resume")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    lines = (workspace / "stopped" / "manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["image"] for line in lines] == [f"{i:03}.jpg" for i in range(LONG_RUN_IMAGES)]
    assert len(list((workspace / "stopped").glob("*.jpg"))) == LONG_RUN_IMAGES
    shares = Counter(line["actor"] for line in log(workspace / "stopped", "batch")[before:])
    assert len(shares) == 2  # The split between the two depends on the machine.
    engine = log(workspace / "stopped", "engine")[-1]
    assert (engine["actors"], engine["cores"], engine["gpus"]) == (2, 1, 0)


def test_failures_may_end_it(batch: Batch, workspace: Path, address: str) -> None:
    """Stop at the first failure, and check that nothing is written after the run has ended."""
    ray = ("--engine", "ray", "--ray-address", address, "--batch-size", "2")
    process = batch("photos", "-o", "failed", *ray, "--max-failures", "0", "--json")
    written = sorted(path.name for path in (workspace / "failed").iterdir())
    assert process.returncode == 1
    assert [json.loads(line)["image"] for line in process.stdout.splitlines()] == [f"{i:02}.jpg" for i in range(6)]
    assert "Stopped after 1 failure: --max-failures is 0." in process.stderr
    assert "Traceback" not in process.stderr
    time.sleep(1)
    assert sorted(path.name for path in (workspace / "failed").iterdir()) == written


def test_a_format_and_a_method_of_the_users_own(batch: Batch, workspace: Path, address: str) -> None:
    """Send a user's method to the actors by value, and write their files in this process."""
    (workspace / "own.py").write_text(
        "import gradcam\n"
        "class Names:\n"
        "    def __init__(self, opening):\n        self.file = (opening.place / 'names.txt').open('a')\n"
        "    def write(self, record, files):\n        self.file.writelines(f'{name}\\n' for name in files)\n"
        "    def close(self):\n        self.file.close()\n"
        "@gradcam.method('mycam', summary='activations times positive gradients')\n"
        "def mycam(activations, gradients):\n    return (activations[:, None] * gradients.clamp(min=0)).sum(2)\n"
    )
    methods = ("--method", "gradcam,own.py:mycam")
    ray = ("--engine", "ray", "--ray-address", address, "--output-format", "own.py:Names", *methods)
    full = [f"{i:02}" for i in range(PICTURES) if f"{i:02}.jpg" != BROKEN]
    names = [f"{stem}-{method}.jpg" for stem in full for method in ("gradcam", "mycam")]
    for options in ((), ("--resume",)):
        assert batch("photos", "-o", "own", *ray, *options).returncode == 1
        assert (workspace / "own" / "names.txt").read_text().splitlines() == names, "none is done twice"


def test_an_actor_that_cannot_work(batch: Batch, workspace: Path, address: str) -> None:
    """Use a model whose weights differ in every process: the run stops with one line and can be resumed."""
    (workspace / "own.py").write_text(
        "import torchvision\ndef make():\n    return torchvision.models.resnet18(num_classes=3)\n"
    )
    model = [
        "--model", "own.py:make", "--mean", ".5,.5,.5", "--std", ".2,.2,.2", "--size", "64", "--activation",
        "softmax",
    ]  # fmt: skip
    process = batch("photos", "-o", "random", "--quiet", "--engine", "ray", "--ray-address", address, *model)
    assert process.returncode == 1
    assert process.stdout == ""
    first, second, _ = process.stderr.splitlines()
    assert first.startswith("The model's weights on ")
    assert second == f"0 of {PICTURES} images are finished. To resume:"
