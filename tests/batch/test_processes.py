"""Several processes, also of several GPUs, for which those on the processor stand in."""

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
from gradcam.batch.engine import Work, explain_here
from gradcam.batch.findings import Request
from gradcam.batch.names import Saving
from gradcam.batch.processes import ProcessEngine
from gradcam.batch.ray.ending import _find_registry_folder, end_local_processes
from gradcam.batch.save import Saver
from gradcam.errors import DeviceError, GradcamError
from gradcam.models import device
from gradcam.sources.list import list_inputs
from tests.cli.test_cli import POSIX, Command, Photo, folder, gradcam_command

__all__ = ["folder", "gradcam_command"]  # fixtures

TWO = ["cpu", "cpu:0"]
NAMES = ("coffee.jpg", "chelsea.jpg", "rocket.jpg", "koala.webp")


def load(device: str) -> gradcam.Classifier:
    return gradcam.load_classifier(device="cpu")


def load_or_die(device: str, folder: Path) -> gradcam.Classifier:
    """The second process ends at its first picture of all."""
    classifier = load(device)
    if device == TWO[1]:
        classifier.model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return classifier


@pytest.fixture
def photos(folder: Path, photo: Photo) -> Path:
    (folder / "photos").mkdir()
    for i in range(12):
        shutil.copy(photo(NAMES[i % 4]), folder / "photos" / f"{i:02}-{NAMES[i % 4]}")
    (folder / "photos" / "05-broken.jpg").write_bytes(photo("coffee.jpg").read_bytes()[:2000])
    return folder / "photos"


def to_work(classifier: gradcam.Classifier, photos: Path, pixels: str = "cpu", **options: Any) -> Work:
    request = Request(layers=["layer4"], **options)
    return Work(classifier, request, list_inputs([photos]).items, batch_size=2, workers=1, pixels=pixels)


def to_saver(work: Work, place: Any = None) -> Saver:
    return Saver(place, {item.name: item.name for item in work.items}, Saving(), work.classifier, work.request)


ALL: dict[str, Any] = {"is_needed": lambda item: True, "log_event": lambda event, **details: None}


@pytest.mark.slow
def test_two_processes_give_what_one_gives_in_its_order(
    classifier: gradcam.Classifier, photos: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own.py").write_text("def score(output):\n    return output[:, 7]\n")
    work = to_work(classifier, photos, "device", target=plugins.find_function(f"{folder / 'own.py'}:score"))
    messages: list[tuple[str, Any]] = []
    runs: list[str] = []

    def tell(event: str, **details: Any) -> None:
        messages.append((event, details))

    def end(run: str) -> None:
        runs.append(run)
        end_local_processes(run)

    monkeypatch.setattr(processes, "end_local_processes", end)
    wanted = [item for i, item in enumerate(work.items) if i not in (2, 3, 8)]
    actual = list(ProcessEngine(load, TWO, 1)(work, to_saver(work), is_needed=wanted.__contains__, log_event=tell))
    expected = list(explain_here(work, to_saver(work), is_needed=wanted.__contains__, log_event=ALL["log_event"]))
    assert [report.record.image for report in actual] == [item.name for item in wanted]
    assert [report.record for report in actual] == [report.record for report in expected]
    assert [report.files for report in actual] == [report.files for report in expected]
    assert messages[0] == ("engine", {"engine": "processes", "devices": TWO})
    batches = [details for event, details in messages if event == "batch"]
    assert [details["start"] for details in batches] == [0, 4, 6, 8, 10, 12]
    assert len({details["actor"] for details in batches}) == 2
    assert multiprocessing.active_children() == []
    assert not any(_find_registry_folder(run).exists() for run in runs)
    assert len(runs) == 1


@pytest.mark.slow
def test_closing_early_ends_the_processes(classifier: gradcam.Classifier, photos: Path, tmp_path: Path) -> None:
    work = to_work(classifier, photos)
    reports = ProcessEngine(load, TWO)(work, to_saver(work), **ALL)
    next(reports)
    assert len(multiprocessing.active_children()) == 2
    reports.close()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@POSIX
def test_a_process_that_ends_is_named_and_none_is_blamed(classifier: gradcam.Classifier, photos: Path) -> None:
    work = to_work(classifier, photos)
    reports, late = [], []  # type: ignore[var-annotated]
    engine = ProcessEngine(partial(load_or_die, folder=photos), TWO)
    with pytest.raises(DeviceError, match=r"^cpu:0: a worker process ended \(signal 9\)\. .*--resume"):
        reports.extend(engine(work, to_saver(work), on_leftover=late.append, **ALL))
    assert all("broken" in item.record.image for item in [*reports, *late] if item.record.error)
    assert multiprocessing.active_children() == []


def fail(device: str) -> gradcam.Classifier:
    raise DeviceError(f"{device} was lost (here)")


def test_an_error_of_a_process_is_what_is_raised_here(classifier: gradcam.Classifier, photos: Path) -> None:
    work = to_work(classifier, photos)
    with pytest.raises(DeviceError, match=r"^cpu(:0)? was lost \(here\)$"):
        list(ProcessEngine(fail, TWO)(work, to_saver(work), **ALL))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(device, "list_gpus", lambda: TWO)


# As docs/extend/method.md says: its name is that of the method, and no longer that of the function.
MINE = """
import gradcam

@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations, gradients):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", [["--device", "cuda"], ["--device", "cpu", "--processes", 2]])
def test_cuda_is_all_that_are_visible_and_processes_may_share_a_device(
    folder: Path, photos: Path, gradcam_command: Command, two: Any, asked: Sequence[str]
) -> None:
    (photos / "05-broken.jpg").unlink()
    (folder / "mine.py").write_text(MINE)
    options = ("batch", "photos", "--batch-size", 2, "--method", "gradcam,mine.py:mycam")
    assert gradcam_command(*options, "--device", "cpu", "-o", "one").status == 0
    two()
    outcome = gradcam_command(*options, *asked, "--pixels", "cpu", "-o", "out")
    assert (outcome.status, outcome.err) == (0, "")
    assert "12 images explained" in outcome.out
    for path in (folder / "one").iterdir():
        if path.name not in ("log.jsonl", "run.json", ".gradcam.lock"):
            assert (folder / "out" / path.name).read_bytes() == path.read_bytes()
    assert f'"device": "{asked[1]}"' in (folder / "out" / "run.json").read_text()
    log = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["devices"] for line in log if line["event"] == "engine"] == [TWO if "cuda" in asked else ["cpu"] * 2]
    assert len({line["actor"] for line in log if line["event"] == "batch"}) == 2
    (folder / "out" / "03-koala-mycam.jpg").unlink()
    assert gradcam_command(*options, *asked, "--pixels", "cpu", "-o", "out", "--resume").status == 0
    assert (folder / "out" / "03-koala-mycam.jpg").exists()


def test_only_code_that_pickle_cannot_send_needs_cloudpickle(
    folder: Path, photos: Path, gradcam_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "05-broken.jpg").unlink()
    (folder / "mine.py").write_text(f"{MINE}\n\ndef score(output):\n    return output[:, 7]\n")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # what makes its import fail
    options = ("batch", "photos", "--batch-size", 2, "--device", "cpu", "--processes", 2, "-o")
    outcome = gradcam_command(*options, "mine", "--method", "mine.py:mycam")
    assert outcome.status == 2
    hint = 'Error: Your own code in several processes needs cloudpickle: pip install ".[processes]" in a clone of gradcam ('
    assert outcome.err.startswith(hint)
    assert outcome.err.count("\n") == 1
    outcome = gradcam_command(*options, "out", "--target", "mine.py:score")
    assert (outcome.status, outcome.err) == (0, "")
    assert "12 images explained" in outcome.out


def test_functions_of_a_script_need_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has another `__main__`: pickle would find no such function there, or another one."""

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
def test_they_hear_no_ctrl_c_from_their_first_moment_on(
    classifier: gradcam.Classifier, photos: Path, capfd: Any
) -> None:
    """A terminal sends it to all of them; the one that started them ends them."""
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.02):
            for item in multiprocessing.active_children():
                with contextlib.suppress(ProcessLookupError):  # it may have ended just now
                    os.kill(item.pid, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        work = to_work(classifier, photos)
        assert len(list(ProcessEngine(load, TWO, 1)(work, to_saver(work), **ALL))) == 13
    finally:
        over.set()
        thread.join()
    assert "Traceback" not in capfd.readouterr().err


def test_processes_are_not_for_ray(photos: Path, gradcam_command: Command) -> None:
    outcome = gradcam_command("batch", "photos", "-o", "out", "--engine", "ray", "--processes", 2)
    assert outcome.status == 2
    assert "--processes is for --engine local: use --actors-per-gpu" in outcome.err
