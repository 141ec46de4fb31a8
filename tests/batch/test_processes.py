"""Test runs on several processes or GPUs; CPU devices stand in for the GPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gradcam
from gradcam import plugins
from gradcam.batch import processes
from gradcam.batch.end_processes import _find_registry_folder, end_local_processes
from gradcam.batch.engine import BatchWork, explain_locally
from gradcam.batch.image_results import ExplainRequest
from gradcam.batch.processes import ProcessEngine
from gradcam.batch.result_names import OutputOptions
from gradcam.batch.save import Saver
from gradcam.errors import DeviceError, GradcamError
from gradcam.models import device
from gradcam.sources.collect import list_inputs
from tests.cli.test_cli import POSIX, Command, Photo, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

TWO_DEVICES = ["cpu", "cpu:0"]
NAMES = ("coffee.jpg", "chelsea.jpg", "rocket.jpg", "koala.webp")


def load(device: str) -> gradcam.Classifier:
    return gradcam.load_classifier(device="cpu")


def load_or_die(device: str, folder: Path) -> gradcam.Classifier:
    """Load a classifier; in the second process, the process ends at its first image."""
    classifier = load(device)
    if device == TWO_DEVICES[1]:
        classifier.model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return classifier


@pytest.fixture
def photos(folder: Path, photo: Photo) -> Path:
    (folder / "photos").mkdir()
    for i in range(12):
        shutil.copy(photo(NAMES[i % 4]), folder / "photos" / f"{i:02}-{NAMES[i % 4]}")
    (folder / "photos" / "05-broken.jpg").write_bytes(photo("coffee.jpg").read_bytes()[:2000])
    return folder / "photos"


def to_work(classifier: gradcam.Classifier, photos: Path, pixels: str = "cpu", **options: Any) -> BatchWork:
    request = ExplainRequest(layers=["layer4"], **options)
    return BatchWork(classifier, request, list_inputs([photos]).items, batch_size=2, workers=1, pixels=pixels)


def to_saver(work: BatchWork, place: Any = None) -> Saver:
    return Saver(place, {item.name: item.name for item in work.items}, OutputOptions(), work.classifier, work.request)


ENGINE_OPTIONS: dict[str, Any] = {"is_needed": lambda item: True, "log_event": lambda event, **details: None}


@pytest.mark.slow
def test_two_processes_give_the_results_of_one_in_the_same_order(
    classifier: gradcam.Classifier, photos: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own.py").write_text("def score(output):\n    return output[:, 7]\n")
    work = to_work(classifier, photos, "device", target=plugins.import_object(f"{folder / 'own.py'}:score"))
    events: list[tuple[str, Any]] = []
    runs: list[str] = []

    log_event = lambda event, **details: events.append((event, details))  # noqa: E731

    def end(run: str) -> None:
        runs.append(run)
        end_local_processes(run)

    monkeypatch.setattr(processes, "end_local_processes", end)
    items = [item for i, item in enumerate(work.items) if i not in (2, 3, 8)]
    engine = ProcessEngine(load, TWO_DEVICES, 1)
    reports = list(engine(work, to_saver(work), is_needed=items.__contains__, log_event=log_event))
    expected = list(explain_locally(work, to_saver(work), items.__contains__, ENGINE_OPTIONS["log_event"]))
    assert [report.record.image for report in reports] == [item.name for item in items]
    assert [report.record for report in reports] == [report.record for report in expected]
    assert [report.files for report in reports] == [report.files for report in expected]
    assert events[0] == ("engine", {"engine": "processes", "devices": TWO_DEVICES})
    batches = [details for event, details in events if event == "batch"]
    assert [details["start"] for details in batches] == [0, 4, 6, 8, 10, 12]
    assert len({details["actor"] for details in batches}) == 2
    assert multiprocessing.active_children() == []
    assert not any(_find_registry_folder(run).exists() for run in runs)
    assert len(runs) == 1


@pytest.mark.slow
def test_closing_early_ends_the_processes(classifier: gradcam.Classifier, photos: Path, tmp_path: Path) -> None:
    work = to_work(classifier, photos)
    reports = ProcessEngine(load, TWO_DEVICES)(work, to_saver(work), **ENGINE_OPTIONS)
    next(reports)
    assert len(multiprocessing.active_children()) == 2
    reports.close()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@POSIX
def test_an_ended_process_is_named_and_no_image_fails(classifier: gradcam.Classifier, photos: Path) -> None:
    work = to_work(classifier, photos)
    reports, late = [], []  # type: ignore[var-annotated]
    engine = ProcessEngine(partial(load_or_die, folder=photos), TWO_DEVICES)
    with pytest.raises(DeviceError, match=r"^cpu:0: a worker process ended \(signal 9\)\. .*--resume"):
        reports.extend(engine(work, to_saver(work), on_leftover=late.append, **ENGINE_OPTIONS))
    assert all("broken" in item.record.image for item in [*reports, *late] if item.record.error)
    assert multiprocessing.active_children() == []


def fail(device: str) -> gradcam.Classifier:
    raise DeviceError(f"{device} was lost (here)")


def test_an_error_of_a_process_is_raised_by_the_engine(classifier: gradcam.Classifier, photos: Path) -> None:
    work = to_work(classifier, photos)
    with pytest.raises(DeviceError, match=r"^cpu(:0)? was lost \(here\)$"):
        list(ProcessEngine(fail, TWO_DEVICES)(work, to_saver(work), **ENGINE_OPTIONS))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(device, "list_gpus", lambda: TWO_DEVICES)


# As in docs/extend/method.md, the decorator replaces the function: its name now refers to the method.
METHOD_FILE = """
import gradcam

@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations, gradients):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--device", "cuda"], ["--device", "cpu", "--processes", 2]])
def test_cuda_uses_all_visible_gpus_and_processes_may_share_a_device(
    folder: Path, photos: Path, gradcam_command: Command, two: Any, arguments: Sequence[str]
) -> None:
    (photos / "05-broken.jpg").unlink()
    (folder / "mine.py").write_text(METHOD_FILE)
    options = ("batch", "photos", "--batch-size", 2, "--method", "gradcam,mine.py:mycam")
    assert gradcam_command(*options, "--device", "cpu", "-o", "one").status == 0
    two()
    outcome = gradcam_command(*options, *arguments, "--pixels", "cpu", "-o", "out")
    assert (outcome.status, outcome.err) == (0, "")
    assert "12 images explained" in outcome.out
    for path in (folder / "one").iterdir():
        if path.name not in ("log.jsonl", "run.json", ".gradcam.lock"):
            assert (folder / "out" / path.name).read_bytes() == path.read_bytes()
    assert f'"device": "{arguments[1]}"' in (folder / "out" / "run.json").read_text()
    log = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    devices = TWO_DEVICES if "cuda" in arguments else ["cpu"] * 2
    assert [line["devices"] for line in log if line["event"] == "engine"] == [devices]
    assert len({line["actor"] for line in log if line["event"] == "batch"}) == 2
    (folder / "out" / "03-koala-mycam.jpg").unlink()
    assert gradcam_command(*options, *arguments, "--pixels", "cpu", "-o", "out", "--resume").status == 0
    assert (folder / "out" / "03-koala-mycam.jpg").exists()


def test_only_code_that_pickle_cannot_send_needs_cloudpickle(
    folder: Path, photos: Path, gradcam_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "05-broken.jpg").unlink()
    (folder / "mine.py").write_text(f"{METHOD_FILE}\n\ndef score(output):\n    return output[:, 7]\n")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # makes the import of cloudpickle fail
    options = ("batch", "photos", "--batch-size", 2, "--device", "cpu", "--processes", 2, "-o")
    outcome = gradcam_command(*options, "mine", "--method", "mine.py:mycam")
    assert outcome.status == 2
    hint = (
        'Error: To run your own code in several processes, install cloudpickle: pip install ".[processes]" in a clone'
    )
    assert outcome.err.startswith(hint)
    assert outcome.err.count("\n") == 1
    outcome = gradcam_command(*options, "out", "--target", "mine.py:score")
    assert (outcome.status, outcome.err) == (0, "")
    assert "12 images explained" in outcome.out


def test_functions_of_a_script_need_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has another `__main__`: pickle would find no function of that name there, or a different one."""

    code = "def score(output):\n    return output[:, 7]"
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(code, scope)
    if importlib.util.find_spec("cloudpickle") is not None:
        assert processes.pickle_job((scope["score"],))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(GradcamError, match=r"cloudpickle: pip install .* \(score is defined in __main__\)"):
        processes.pickle_job((scope["score"],))  # type: ignore[arg-type]
    assert pickle.loads(processes.pickle_job((len, 1))) == (len, 1)  # type: ignore[arg-type]


@pytest.mark.slow
@POSIX
def test_processes_ignore_ctrl_c_from_the_start(classifier: gradcam.Classifier, photos: Path, capfd: Any) -> None:
    """A terminal sends Ctrl+C to all processes; the parent process ends the others."""
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.02):
            for item in multiprocessing.active_children():
                with contextlib.suppress(ProcessLookupError):  # The process may just have ended.
                    os.kill(item.pid, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        work = to_work(classifier, photos)
        assert len(list(ProcessEngine(load, TWO_DEVICES, 1)(work, to_saver(work), **ENGINE_OPTIONS))) == 13
    finally:
        over.set()
        thread.join()
    assert "Traceback" not in capfd.readouterr().err


def test_processes_are_not_for_ray(photos: Path, gradcam_command: Command) -> None:
    outcome = gradcam_command("batch", "photos", "-o", "out", "--engine", "ray", "--processes", 2)
    assert outcome.status == 2
    assert "--processes is for --engine local: use --actors-per-gpu" in outcome.err
