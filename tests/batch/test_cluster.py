"""Test the parts of the Ray engine that need no Ray: jobs, actors' answers, cluster addresses, and the end of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradcam
from gradcam import plugins
from gradcam.batch.actor import BLOCKS_PER_ACTOR, Actor, ActorJob, ActorReply, explain_blocks, pack_blocks, to_job
from gradcam.batch.end_processes import _find_registry_folder, end_local_processes
from gradcam.batch.engine import BatchWork, explain_locally
from gradcam.batch.image_results import ExplainRequest
from gradcam.batch.pool import cut_batches
from gradcam.batch.ray import session
from gradcam.batch.ray.engine import pickle_job
from gradcam.batch.ray.session import SILENT_LEVEL, ActorLayout, check_address, find_layout, import_ray, quiet_ray
from gradcam.batch.result_names import OutputOptions
from gradcam.batch.save import Saver
from gradcam.errors import ClusterError, ModelError, OutputError, StoreError
from gradcam.sources.collect import list_inputs
from gradcam.sources.contents import InputImage
from gradcam.storage import retry
from gradcam.storage.fetch import StoreImage
from gradcam.storage.output import DiskWriter
from tests.cli.test_cli import POSIX, Command, Photo, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

NAMES = ("chelsea.jpg", "coffee.jpg", "macaw.webp", "koala.webp", "panda.webp")


def load(device: str) -> gradcam.Classifier:
    return gradcam.load_classifier(device=device)


@pytest.fixture
def photos(folder: Path, photo: Photo) -> Path:
    """Return a folder with five photographs and a broken file."""
    (folder / "photos").mkdir()
    for name in NAMES:
        shutil.copy(photo(name), folder / "photos" / name)
    (folder / "photos" / "broken.jpg").write_bytes(photo("coffee.jpg").read_bytes()[:2000])
    return folder / "photos"


@pytest.fixture
def work(classifier: gradcam.Classifier, photos: Path) -> BatchWork:
    request = ExplainRequest(layers=[classifier.layer])
    return BatchWork(classifier, request, list_inputs([photos]).items, batch_size=2, workers=1)


def to_saver(work: BatchWork, place: Any) -> Saver:
    stems = {item.name: item.name for item in work.items}
    return Saver(place, stems, OutputOptions(("overlay",), "jpg", 90, 0.5, "turbo"), work.classifier, work.request)


@pytest.fixture
def disk(folder: Path) -> DiskWriter:
    (folder / "out" / ".unfinished").mkdir(parents=True)
    return DiskWriter(folder / "out", folder / "out" / ".unfinished")


@pytest.fixture
def act() -> Iterator[Callable[[ActorJob], Actor]]:
    """Return a function that makes an actor in this process; unregister its actors at the end."""
    threads, signed_in = torch.get_num_threads(), list[str]()

    def make(job: ActorJob) -> Actor:
        actor = Actor(pickle.dumps(job), cores=1)
        signed_in.append(job.run)
        actor._registration.release()
        return actor

    yield make
    torch.set_num_threads(threads)
    for run in signed_in:
        shutil.rmtree(_find_registry_folder(run))


def ask(actor: Actor, work: BatchWork, stems: dict[str, str]) -> list[ActorReply]:
    blocks = pack_blocks(work, SimpleNamespace(stems=stems), lambda item: True, actors=1)  # type: ignore[arg-type]
    rows = [row for block in blocks for row in actor({"block": [block]})]
    return [pickle.loads(answer) for row in rows for answer in row["answer"]]


# What a job contains


def items(count: int) -> list[InputImage]:
    return [InputImage(f"{i}.jpg", content=None) for i in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("pictures", "actors"), [(1, 1), (24, 1), (25, 2), (400, 1), (400, 2), (10000, 3)])
def test_blocks_have_the_batches_of_every_engine(pictures: int, actors: int) -> None:
    work = BatchWork(None, None, items(pictures), batch_size=4, workers=1)  # type: ignore[arg-type]
    stems = {item.name: item.name[:-4] for item in work.items}

    def is_needed(item: InputImage) -> bool:
        return not 8 <= int(item.name[:-4]) < 17

    packed = pack_blocks(work, SimpleNamespace(stems=stems), is_needed, actors)  # type: ignore[arg-type]
    blocks = [pickle.loads(zlib.decompress(block)) for block in packed]
    assert [batch for block in blocks for batch in block.batches] == list(cut_batches(work.items, 4, is_needed))
    for block in blocks:
        assert block.stems == {item.name: stems[item.name] for batch in block.batches for item in batch.items}
    assert all(len(block.batches) <= 32 for block in blocks)
    if pictures >= 400:
        assert len(blocks) >= BLOCKS_PER_ACTOR * actors  # enough blocks for all actors to end at about the same time


def test_two_million_images_fit_into_memory() -> None:
    """Measure images of a store, with names of a realistic length, in this process and in Ray's memory."""
    names = [f"2024-03/{i % 1000:04}/IMG_{i:08}_{i * 7919 % 99991:05}" for i in range(20_000)]
    pictures = [InputImage(f"{name}.jpg", StoreImage(f"memory://bucket/photos/{name}.jpg")) for name in names]
    work = BatchWork(None, None, pictures, batch_size=32, workers=1)  # type: ignore[arg-type]
    saver = SimpleNamespace(stems={item.name: item.name[:-4] for item in pictures})
    packed = pack_blocks(work, saver, lambda item: True, actors=2)  # type: ignore[arg-type]
    assert sum(map(len, packed)) / len(pictures) < 60


# Answers of an actor


def test_an_actor_returns_the_results_of_the_local_engine(
    work: BatchWork, disk: DiskWriter, act: Callable[[ActorJob], Actor]
) -> None:
    batches = list[tuple[str, int]]()
    log_event = lambda event, **details: batches.append((event, details["start"]))  # noqa: E731
    local_outcomes = explain_locally(work, to_saver(work, None), lambda item: True, log_event)
    expected = {outcome.record: outcome.files for outcome in local_outcomes}
    assert batches == [("batch", 0), ("batch", 2), ("batch", 4)]
    for place in (None, disk):
        saver = to_saver(work, place)
        answers = ask(act(to_job(load, work, saver, "cpu", 1)), work, dict(saver.stems))
        outcomes = [outcome for answer in answers for outcome in answer.outcomes]
        assert [len(answer.outcomes) for answer in answers] == [2, 2, 2]
        assert [outcome.record for outcome in outcomes] == list(expected)
        for outcome in outcomes:
            files = {name: (disk.root / name).read_bytes() for name in outcome.record.files if place}
            assert (files or outcome.files) == expected[outcome.record]
        (name, ready), *events = [event for answer in answers for event in answer.events]
        assert name == "actor"
        assert 0 < ready["seconds"] < time.time() - ready["ready"] + ready["seconds"]
        assert [(name, details["start"]) for name, details in events] == batches
        assert {(details["node"], details["actor"]) for _, details in events} == {(socket.gethostname(), os.getpid())}


def test_an_actor_postpones_images_of_a_store_that_does_not_answer(
    work: BatchWork, act: Callable[[ActorJob], Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "SHORT_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(retry, "RETRY_SECONDS", 0.3)
    dead = InputImage("dead.jpg", StoreImage("http://127.0.0.1:9/dead.jpg"))
    work = replace(work, items=[work.items[0], dead, *work.items[1:]])
    saver = to_saver(work, None)
    actor = act(to_job(load, work, saver, "cpu", 1))
    sent: list[bytes] = []

    def stream(blocks: list[bytes]) -> Generator[ActorReply, None, None]:
        sent.extend(blocks)
        yield from (pickle.loads(answer) for row in actor({"block": blocks}) for answer in row["answer"])

    blocks = pack_blocks(work, saver, lambda item: True, actors=1)
    reports = explain_blocks(work, saver, blocks, stream, log_event=lambda event, **_: None, on_leftover=None)
    records = [report.record for report in reports]
    assert [record.image for record in records] == [item.name for item in work.items if item is not dead] + [dead.name]
    assert "the store has not answered correctly" in str(records[-1].error)
    assert len(sent) == len(blocks) + 1


def fail(device: str, error: Exception) -> gradcam.Classifier:
    raise error


def load_another(device: str) -> gradcam.Classifier:
    classifier = gradcam.load_classifier(device=device)
    with torch.no_grad():
        next(classifier.model.parameters()).add_(1)
    return classifier


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"load": load_another}, "ClusterError", "The model's weights on .+ differ from the weights on the machine"),
        ({"load": partial(fail, error=OSError("no"))}, "ClusterError", r"The actor on .+ failed: OSError: no \("),
        ({"load": partial(fail, error=ModelError("no"))}, "ClusterError", "The actor on .+ failed: no"),
        ({"load": partial(fail, error=StoreError("no"))}, "StoreError", "no"),
        ({"version": "0.1"}, "ClusterError", r"gradcam is version .+ on .+, but version 0\.1 on .+: install the same"),
        ({"shared_folders": [Path("/nowhere/out")]}, "ClusterError", "/nowhere/out does not exist on .+: use a folder"),
        ({"shared_folders": [Path("/")], "folder": Path("/nowhere")}, "ClusterError", "/nowhere does not exist on .+"),
    ],
)
def test_an_actor_that_cannot_work_reports_the_reason(
    work: BatchWork, disk: DiskWriter, act: Any, *, change: dict[str, Any], kind: str, message: str
) -> None:
    saver = to_saver(work, disk)
    job = replace(to_job(load, work, saver, "cpu", 1), **change)
    *_, answer = ask(act(job), work, dict(saver.stems))
    assert type(answer.error).__name__ == kind
    assert re.match(message, str(answer.error))
    assert not answer.outcomes
    assert not list(disk.root.glob("*.jpg"))


def test_another_version_is_reported_before_the_block_is_unpickled(
    work: BatchWork, disk: DiskWriter, act: Callable[[ActorJob], Actor]
) -> None:
    job = to_job(load, work, to_saver(work, disk), "cpu", 1)
    old_job = replace(job, version="0.1", run="another")
    for actor_job, message in ((old_job, "gradcam is "), (job, "The actor on .+ failed: error: ")):
        (answer,) = [pickle.loads(row["answer"][0]) for row in act(actor_job)({"block": [b"of another version"]})]
        assert re.match(message, str(answer.error))


def test_the_reason_is_the_message_of_ray_without_its_advice() -> None:
    pytest.importorskip("ray")
    from ray import exceptions

    from gradcam.batch.ray.engine import _describe_ray_error

    class Ray:
        pass

    Ray.exceptions = exceptions  # type: ignore[attr-defined]
    error = exceptions.RayTaskError("f", "Traceback\nTo change retry attempts, configure", ValueError("not whole"))
    message = "Ray stopped the run: ValueError: not whole (for the traceback, set GRADCAM_TRACEBACK=1)"
    assert _describe_ray_error(Ray, error.as_instanceof_cause()) == message
    assert _describe_ray_error(Ray, RuntimeError("first\nlast")) == "Ray stopped the run: last"
    missing = _describe_ray_error(Ray, RuntimeError("first\nNo module named 'gradcam'"))
    assert missing.endswith('On every machine, run in a clone of gradcam: pip install ".[ray]"')


class Full:
    """A place that is full."""

    def write(self, files: object, views: object) -> None:
        raise OutputError("out/: no space left on device; free some space, then continue with --resume")


def test_a_place_that_is_full_stops_the_block(work: BatchWork, act: Callable[[ActorJob], Actor]) -> None:
    saver = to_saver(work, Full())
    answers = ask(act(to_job(load, work, saver, "cpu", 1)), work, dict(saver.stems))
    assert [(type(answer.error), len(answer.outcomes)) for answer in answers] == [(OutputError, 0)] * len(answers)
    assert "no space left" in str(answers[0].error)


# Cluster addresses


class Plain(socketserver.BaseRequestHandler):
    """A server that answers HTTP, but not HTTP/2."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


class Grpc(socketserver.BaseRequestHandler):
    """A server that answers HTTP/2."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))


@contextlib.contextmanager
def serve(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:  # A failed test also has to end the thread.
            server.shutdown()
            thread.join()


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    check_address("auto")
    with serve(Grpc) as address:
        check_address(address)
    not_ray = "^127.0.0.1:.*: the server at this address is not Ray"
    with serve(Plain) as address, pytest.raises(ClusterError, match=not_ray):
        check_address(address)
    with pytest.raises(
        ClusterError, match=f"^{address}: the Ray head does not answer \\(connection refused\\). Start the head"
    ):
        check_address(address)
    monkeypatch.setattr(session, "CONNECT_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"^{address}: the Ray head does not answer \\(timed out\\)"):
            check_address(address)
    for wrong in ("nonsense", "http://a:1", "a b:1", ":1", "a:"):
        with pytest.raises(ClusterError, match="expected HOST:PORT, such as"):
            check_address(wrong)
    with pytest.raises(ClusterError, match=r"^ray://a:1: .+ `ray job submit`"):
        check_address("ray://a:1")


class Nodes:
    """Stands in for the part of Ray that lists the machines."""

    def __init__(self, *nodes: dict[str, float], dead: int = 0) -> None:
        self._nodes = [{"Resources": node, "Alive": i >= dead} for i, node in enumerate(nodes)]

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes


@pytest.mark.parametrize(
    ("nodes", "device", "expected"),
    [
        (Nodes({"CPU": 16}), "cpu", ActorLayout(4, 4, "cpu")),
        (Nodes({"CPU": 1}, {"CPU": 1}), "auto", ActorLayout(2, 1, "cpu")),
        (Nodes({"CPU": 6}, {"CPU": 3}, {}), "auto", ActorLayout(3, 3, "cpu")),
        (Nodes({"CPU": 8}, {"CPU": 3}, dead=1), "auto", ActorLayout(1, 3, "cpu")),
        (Nodes({"CPU": 4}, {"CPU": 32, "GPU": 4}, {"CPU": 12, "GPU": 2}), "auto", ActorLayout(6, 6, "cuda")),
        (Nodes({"CPU": 1, "GPU": 2}), "cuda", ActorLayout(2, 0.5, "cuda")),
        (Nodes({"CPU": 8, "GPU": 2}), "cpu", ActorLayout(2, 4, "cpu")),
    ],
)
def test_an_actor_for_each_gpu_or_few_cores(nodes: Nodes, device: str, expected: ActorLayout) -> None:
    assert find_layout(nodes, device) == expected


@pytest.mark.parametrize(
    ("nodes", "per_gpu", "expected", "threads"),
    [
        (Nodes({"CPU": 4}, {"CPU": 32, "GPU": 4}, {"CPU": 12, "GPU": 2}), 2, ActorLayout(12, 3, "cuda", 2), 3),
        (Nodes({"CPU": 16, "GPU": 1}), 7, ActorLayout(7, 2, "cuda", 7), 2),
        (Nodes({"CPU": 2, "GPU": 1}), 3, ActorLayout(3, 0.6666, "cuda", 3), 1),
        (Nodes({"GPU": 1}), 2, ActorLayout(2, 0, "cuda", 2), 1),
    ],
)
def test_actors_that_share_a_gpu(nodes: Nodes, per_gpu: int, expected: ActorLayout, threads: int) -> None:
    layout = find_layout(nodes, "auto", per_gpu)
    assert (layout, layout.threads) == (expected, threads)


def test_all_actors_that_share_a_gpu_fit_on_it() -> None:
    """Ray counts GPUs in units of 1/10,000, and rounds to the nearest."""
    for per_gpu in range(1, 101):
        parts = ActorLayout(per_gpu, 1, "cuda", per_gpu).gpus * 10_000
        assert parts == pytest.approx(round(parts), abs=1e-6)
        assert 10_000 - per_gpu < round(parts) * per_gpu <= 10_000


def test_no_gpu_and_no_core() -> None:
    with pytest.raises(ClusterError, match="There is no GPU in this Ray cluster"):
        find_layout(Nodes({"CPU": 2}), "cuda")
    with pytest.raises(ClusterError, match="There is no GPU in this Ray cluster: leave out --actors-per-gpu"):
        find_layout(Nodes({"CPU": 2}), "auto", 2)
    with pytest.raises(ClusterError, match="has no CPU cores"):
        find_layout(Nodes({}), "auto")


# Errors before the model is loaded


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradcam.models.load.load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("no_model")
def test_wrong_usage(gradcam_command: Command, photos: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(*arguments: str) -> str:
        outcome = gradcam_command("batch", "photos", "-o", "out", *arguments)
        assert outcome.status == 2
        assert outcome.out == ""
        assert not (folder / "out").exists()
        return outcome.err

    assert "--ray-address needs --engine ray" in batch("--ray-address", "a:1")
    assert "--actors-per-gpu needs --engine ray" in batch("--actors-per-gpu", "2")
    assert "--actors-per-gpu needs GPUs" in batch("--engine", "ray", "--device", "cpu", "--actors-per-gpu", "2")
    assert "use one of auto, cpu, cuda" in batch("--engine", "ray", "--device", "cuda:1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"127.0.0.1:{server.getsockname()[1]}"
    message = (
        f"Error: {dead}: the Ray head does not answer (connection refused). Start the head with `ray start --head`.\n"
    )
    assert batch("--engine", "ray", "--ray-address", dead) == message
    monkeypatch.setenv("RAY_ADDRESS", dead)
    assert batch("--engine", "ray") == message
    monkeypatch.setitem(sys.modules, "ray", None)
    assert batch("--engine", "ray") == 'Error: Ray is not installed: pip install ".[ray]" in a clone of gradcam\n'


def test_a_broken_ray_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    message = r"^Ray cannot be imported \(No module named 'no_such_module'\): pip install"
    with pytest.raises(ClusterError, match=message):
        import_ray()


def test_a_cluster_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mismatched:
        def is_initialized(self) -> bool:
            return False

        def init(self, **options: object) -> None:
            raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n")

        def shutdown(self) -> None:
            ended.append(True)

    ended = list[bool]()
    monkeypatch.setattr(session, "import_ray", Mismatched)
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    reason = r"Version mismatch: The cluster was started with: Ray: 2\.9\.0"
    message = rf"^auto: the Ray cluster cannot be joined \({reason}\)\."
    with pytest.raises(ClusterError, match=message + r" If .+ set RAY_AUTH_MODE=token\.$"), session.connect("auto"):
        pass
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ClusterError, match=message + "$"), session.connect("auto"):
        pass
    assert ended == [True, True]
    assert signal.getsignal(signal.SIGTERM) is handler


LOADER_FILE = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Load:
    word: str

    def __call__(self, device):
        return f"{self.word} on {device}"

load = Load("loaded")
"""


def test_objects_from_a_users_file_are_pickled_with_their_code(tmp_path: Path) -> None:
    """Unpickle in a process that cannot import the module, after the file is deleted."""
    ray = import_ray()
    (tmp_path / "mine.py").write_text(LOADER_FILE)
    load = plugins.load_plugin("models", f"{tmp_path / 'mine.py'}:load")
    packed = pickle_job(ray, {"load": load})  # type: ignore[arg-type]  # a job has more in it
    (tmp_path / "mine.py").unlink()
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)['load']('cpu'))"
    result = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    assert result.stdout == b"loaded on cpu\n"


# The end of a run


REGISTERED_PROCESS = """
import sys, time
from gradcam.batch.end_processes import register_process
lock = register_process(sys.argv[1])
print("signed in", flush=True)
time.sleep(60)
"""


@POSIX
def test_only_registered_processes_are_ended(tmp_path: Path) -> None:
    run = f"test-of-ending-{os.getpid()}"
    elsewhere = os.environ | {"TMPDIR": str(tmp_path)}  # the environment of a Ray that another user started
    command = [sys.executable, "-c", REGISTERED_PROCESS, run]
    with subprocess.Popen(command, env=elsewhere, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        # A registered process that has ended, whose id now belongs to another process: this one.
        (_find_registry_folder(run) / str(os.getpid())).touch()
        end_local_processes(run)
        assert worker.poll() == -signal.SIGKILL or worker.wait(1) == -signal.SIGKILL
    assert not _find_registry_folder(run).exists()
    end_local_processes(run)  # no registered process is left


def test_loggers_are_restored() -> None:
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    logger = logging.getLogger("ray.data")
    logger.addHandler(handler)
    try:
        with quiet_ray():
            assert handler.level == SILENT_LEVEL
        assert handler.level == logging.INFO
    finally:
        logger.removeHandler(handler)
