"""Test that the programs and notebooks of examples/ run, and give the documented results."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

import gradcam
from tests.docs.pages import ROOT, environment

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> str:
    """Run the program in the current folder and return its output."""
    words = [sys.executable, EXAMPLES / name, *arguments]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.iterdir():
        if path.name != "README.md" and path.suffix in (".py", ".sh", ".ipynb"):
            assert f"]({path.name})" in listed
            assert path.stem in tests


@pytest.mark.slow
def test_a_training_is_logged() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed = run("train_and_log.py", "--epochs", "3", "--log", "log")
    assert printed.count("epoch") == 3
    events = EventAccumulator("log").Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert events.Tags()["images"] == [f"gradcam/{i}" for i in range(6)]
    assert [event.step for event in events.Images("gradcam/5")] == [0, 1, 2, 3]
    assert (events.Images("gradcam/5")[0].width, events.Images("gradcam/5")[0].height) == (96, 96)


@pytest.mark.slow
def test_methods_are_told_apart_from_maps_that_know_nothing() -> None:
    pictures = [str(ROOT / "assets" / name) for name in ("coffee.jpg", "koala.webp")]
    printed = run("evaluate_methods.py", *pictures, "--metrics", "average-drop,complexity")
    assert all(name in printed for name in ("gradcam", "layercam", "hirescam", "centre", "average-drop"))


def test_a_scan_of_16_bits_is_explained() -> None:
    printed = run("clinical_16bit.py", "--output", "out.png")
    assert "fracture" in printed
    assert "65535" in printed  # the note about the range of 16-bit values
    assert gradcam.read_image("out.png").shape == (256, 256, 3)


def test_a_job_of_an_array_takes_its_share() -> None:
    shutil.copytree(ROOT / "assets", "photos", ignore=shutil.ignore_patterns("[!c]*", "*.csv"))
    variables = {**environment(), "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "2"}
    for _ in range(2):  # the second run has nothing left to do
        subprocess.run([EXAMPLES / "slurm_array.sh", "photos", "out"], env=variables, check=True, capture_output=True)
    names = {record.image for record in gradcam.read_manifest("out")}
    assert 0 < len(names) < len(list(Path("photos").iterdir()))
    assert Path("out/run-2-of-2.json").exists()


class TestService:
    """The service returns an overlay for an image, and status 400 for invalid input."""

    @pytest.fixture(scope="class")
    def client(self) -> Any:
        from fastapi.testclient import TestClient

        sys.path.insert(0, str(EXAMPLES))
        try:
            import web_service
        finally:
            sys.path.remove(str(EXAMPLES))
        return TestClient(web_service.app)

    def test_the_form(self, client: Any) -> None:
        assert 'type="file"' in client.get("/").text

    @pytest.mark.parametrize("label", [None, "cup"])
    def test_a_picture(self, client: Any, label: str | None) -> None:
        data = (ROOT / "assets/coffee.jpg").read_bytes()
        answer = client.post("/explain", files={"image": data}, params={"label": label} if label else {})
        assert answer.status_code == 200
        assert answer.headers["X-Label"] == (label or "espresso")
        Path("answer.png").write_bytes(answer.content)
        expected = gradcam.load_classifier().explain(ROOT / "assets/coffee.jpg", target=label)
        assert np.array_equal(np.asarray(Image.open("answer.png")), expected.overlay())

    @pytest.mark.parametrize(("data", "label"), [(b"nothing", None), (b"", None), ("coffee.jpg", "no such class")])
    def test_errors_are_reported(self, client: Any, data: bytes | str, label: str | None) -> None:
        content = (ROOT / "assets" / data).read_bytes() if isinstance(data, str) else data
        answer = client.post("/explain", files={"image": ("a", content)}, params={"label": label} if label else {})
        assert answer.status_code == 400
        assert len(answer.json()["detail"]) > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "pictures"), [("first_steps.ipynb", 3), ("trust.ipynb", 2)])
def test_a_notebook_runs_and_shows_its_pictures(name: str, pictures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # committed notebooks have no outputs
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    displayed = [output for output in outputs if {"image/png", "text/html"} & set(output.get("data", {}))]
    assert len(displayed) >= pictures
