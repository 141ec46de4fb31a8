"""Test `gradcam evaluate`."""

from __future__ import annotations

import csv
import importlib.util
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcam
from gradcam.cli._terminal import TerminationSignal
from gradcam.evaluation import evaluate
from gradcam.evaluation.metrics import DEFAULT_GROUPS, METRICS
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.results import StudyEntry
from gradcam.evaluation.study.run import Study
from gradcam.evaluation.study.write import to_csv
from tests import colour_model
from tests.cli.test_cli import Command, files, folder, gradcam_command, pixels

__all__ = ["folder", "gradcam_command"]  # fixtures

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is missing")

MODEL = ("-m", f"{colour_model.__file__}:make", "--size", "32", "--crop", "1", "--mean", "0,0,0", "--std", "1,1,1")
QUICK = ("--methods", "gradcam,eigencam", "--metrics", "average-drop,complexity")
NOTE = "Note: Assumed softmax for the class probabilities"


@pytest.fixture
def pictures(folder: Path) -> Path:
    return colour_model.paint_all(folder / "pictures")


@pytest.fixture
def command(gradcam_command: Command, folder: Path) -> Command:
    """Return a function that runs `gradcam evaluate` with a network of five named colour classes."""
    labels = folder / "labels.txt"
    labels.write_text("\n".join(colour_model.LABELS) + "\n")
    return lambda *arguments: gradcam_command("evaluate", "--labels", labels, "-l", "relu", *MODEL, *arguments)


def load() -> gradcam.Classifier:
    return gradcam.load_classifier(
        f"{colour_model.__file__}:make", labels=list(colour_model.LABELS), mean=(0, 0, 0), std=(1, 1, 1), size=32,
        crop=1.0, layer="relu", device="cpu",
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# Results


def test_a_table_on_the_terminal_and_what_is_the_same_for_all(command: Command, folder: Path, pictures: Path) -> None:
    outcome = command(pictures, "--methods", "gradcam,eigencam", "--metrics", "average-drop,grid", "--seed", "2")
    assert outcome.status == 0
    assert files(folder) == ["labels.txt", *(f"pictures/{path.name}" for path in sorted(pictures.iterdir()))]
    note, *message = outcome.err.splitlines()
    assert note.startswith(NOTE)
    model = f"{colour_model.__file__}:make on cpu"
    assert message == [
        f"7 images, 7 mosaics of four   {model}   layer relu   seed 2",
        "logit of the most probable class; shorter side to 32, centre crop 32 x 32, bilinear",
        "Cost: 6 heatmaps x 1 forward pass x 7 images = 42 forward passes, plus 1 run of each method per image and 1 for "
        "each of the 7 mosaics.",
    ]
    results = evaluate(load(), pictures, methods=["gradcam", "eigencam"], metrics=["average-drop", "grid"], seed=2)
    mean = np.mean([value for value in results.values("gradcam", "average-drop") if value is not None])
    (row, *_) = [line for line in outcome.out.splitlines() if line.startswith("gradcam ")]
    assert f"{mean:.3f}".removeprefix("0") + " ±" in row
    assert outcome.out.splitlines()[-2].startswith("Too few images (n): naming a best method needs 8 images")


def test_all_kinds_of_output_in_a_folder(command: Command, folder: Path, pictures: Path) -> None:
    outcome = command(pictures, "--methods", "hirescam", "--metrics", "insertion,deletion", "-o", "out/")
    assert outcome.status == 0
    written = ["results.csv", "results.json", "results.tex", "curves.png", "examples.png"]
    if importlib.util.find_spec("matplotlib") is None:
        written.remove("curves.png")
    assert [line for line in outcome.out.splitlines() if "→" in line] == [f"  →  out/{name}" for name in written]
    assert [name for name in files(folder / "out") if not name.startswith(".")] == sorted([*written, "journal.jsonl"])
    results = evaluate(load(), pictures, methods=["hirescam"], metrics=["insertion", "deletion"])
    assert (folder / "out" / "results.csv").read_text() == to_csv(results)
    document = json.loads((folder / "out" / "results.json").read_text())
    assert document["conditions"]["target"] == "the most probable class"
    assert r"\toprule" in (folder / "out" / "results.tex").read_text()
    assert pixels(folder / "out" / "examples.png").shape[0] > 5 * 168


@pytest.mark.parametrize("name", ["table.csv", "new/table.json", "table.TEX"])
def test_one_kind_of_output_by_its_suffix(command: Command, folder: Path, pictures: Path, name: str) -> None:
    outcome = command(pictures, *QUICK, "-q", "-o", name)
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "")
    written = [path for path in files(folder) if "pictures" not in path and path != "labels.txt"]
    assert sorted(path for path in written if ".lock" not in path) == [name, f"{name}.journal"]


def test_the_same_command_gives_the_same_table(command: Command, folder: Path, pictures: Path) -> None:
    metrics = ",".join(name for name in DEFAULT_GROUPS if name != "coherency")
    outcomes = [
        command(pictures, "--methods", "gradcam", "--metrics", metrics, "--limit", 5, "-o", f"{name}/", "-q")
        for name in ("one", "two")
    ]
    assert [outcome.status for outcome in outcomes] == [0, 0]
    for name in ("results.csv", "results.json", "results.tex", "examples.png"):
        assert (folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes()
    assert len({row["image"] for row in rows(folder / "one" / "results.csv") if "+" not in row["image"]}) == 5


def test_records_are_printed_as_pictures_are_judged(command: Command, pictures: Path) -> None:
    outcome = command(pictures, *QUICK, "--json")
    assert outcome.status == 0
    entries = [StudyEntry.from_json(line) for line in outcome.out.splitlines()]
    expected = evaluate(load(), pictures, methods=["gradcam", "eigencam"], metrics=["average-drop", "complexity"])
    assert entries == list(expected.entries)
    assert all(line.startswith(NOTE) for line in outcome.err.splitlines())


def test_metrics_of_localisation_from_boxes(command: Command, folder: Path, pictures: Path) -> None:
    (folder / "boxes.csv").write_text(
        "image,left,top,right,bottom,class\n0-red.png,2,2,38,34,red\n1-green.png,2,2,38,34,green\n"
    )
    outcome = command(
        pictures, "--methods", "gradcam", "--annotations", "boxes.csv", "--metrics", "annotations", "-o", "a.csv"
    )
    assert outcome.status == 0
    table = rows(folder / "a.csv")
    assert {row["metric"] for row in table} == {name for name, item in METRICS.items() if item.group == "annotations"}
    assert {row["image"] for row in table} == {"0-red.png", "1-green.png"}
    pointing = [
        float(row["value"]) for row in table if (row["method"], row["metric"]) == ("gradcam", "energy-pointing")
    ]
    assert pointing == pytest.approx([1, 1], abs=0.1)
    assert len({row["annotations_sha256"] for row in table} - {""}) == 1


def test_without_controls(command: Command, pictures: Path) -> None:
    outcome = command(pictures, *QUICK, "--no-controls")
    assert outcome.status == 0
    assert "constant" not in outcome.out
    assert "controls" not in outcome.out


def test_costly_metrics_are_announced(command: Command, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Study, "run", lambda self, journal=None, *, progress=None: iter(()))
    outcome = command(pictures, "--methods", "all", "--metrics", "complexity")
    assert outcome.status == 1
    (line,) = [
        line for line in outcome.err.splitlines() if line.startswith("Methods with several forward passes per run")
    ]
    for name in ("ablationcam 1 + tail x channels", "scorecam 1 + channels", "rise 1 + 4000"):
        assert name in line
    assert "gradcam 1" not in line
    assert [line for line in outcome.err.splitlines() if line.startswith("Note: rollout is left out: ")]


# Errors


def test_unreadable_images_are_reported(command: Command, folder: Path, pictures: Path) -> None:
    (pictures / "broken.png").write_bytes((pictures / "0-red.png").read_bytes()[:70])
    outcome = command(pictures, *QUICK, "-o", "table.csv", "-q")
    assert outcome.status == 1
    assert outcome.err.startswith("broken.png: ")
    assert outcome.err.count("\n") == 1
    assert len({row["image"] for row in rows(folder / "table.csv")}) == 7


def test_nothing_but_broken_pictures(command: Command, folder: Path) -> None:
    (folder / "bad").mkdir()
    (folder / "bad" / "broken.png").write_text("no picture")
    outcome = command("bad", *QUICK, "-o", "table.csv", "-q")
    assert outcome.status == 1
    assert outcome.err.splitlines()[-1] == "No image could be evaluated."
    assert not (folder / "table.csv").exists()


def test_grid_metrics_without_four_classes(command: Command, pictures: Path) -> None:
    few = [pictures / name for name in ("0-red.png", "1-green.png", "2-blue.png")]
    outcome = command(*few, "--methods", "gradcam", "--metrics", "all", "--limit", 1, "--no-controls")
    assert outcome.status == 0
    assert "Note: grid-order, grid-mass and grid-maximum are left out: " in outcome.err
    assert "maximum ↑" not in outcome.out
    outcome = command(*few, "--metrics", "grid")
    assert outcome.status == 2
    assert "of four" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metrics", "iou"], "'iou' needs annotations of the objects: give --annotations PATH"),
        (["--metrics", "accuracy"], "There is no metric 'accuracy'."),
        (["--metrics", ","], "',' contains no name."),
        (["--methods", "gradcan"], "There is no method or control 'gradcan'. Nearest: 'gradcam'"),
        (["--methods", "gradcam,rollout"], "rollout cannot be used with this model"),
        (["--annotations", "missing.csv"], "missing.csv: does not exist"),
        (["--limit", "0"], "0 is out of range"),
        (["--seed", "-1"], "-1 is out of range"),
        (["-c", "violet"], "violet"),
        (["--resume"], "--resume and --overwrite need --output"),
        (["--resume", "--overwrite", "-o", "out"], "give only one of them"),
        (["-o", "table.xlsx"], "expected a file that ends in .csv, .json, .tex, or a folder: table.xlsx/"),
        (["-o", "labels.txt/out"], "labels.txt"),
    ],
)
def test_wrong_usage(command: Command, folder: Path, pictures: Path, arguments: list[str], message: str) -> None:
    outcome = command(pictures, *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err
    assert not [path for path in files(folder) if path.startswith(("out", "table"))]


def test_an_earlier_study_is_kept_unless_one_says_what_to_do(command: Command, folder: Path, pictures: Path) -> None:
    first = command(pictures, *QUICK, "-q", "-o", "table.csv")
    assert first.status == 0
    before = (folder / "table.csv").read_bytes()
    command(pictures, *QUICK, "-q", "-o", "table.csv").check_error(
        2, "Give --resume to continue this study, --overwrite to"
    )
    command(pictures, *QUICK, "-q", "-o", "table.csv", "--resume", "--seed", "1").check_error(2, "seed: 0 → 1")
    assert (folder / "table.csv").read_bytes() == before
    assert command(pictures, *QUICK, "-q", "-o", "table.csv", "--overwrite", "--seed", "1").status == 0
    assert {row["seed"] for row in rows(folder / "table.csv")} == {"1"}


def test_a_file_of_somebody_else_is_not_overwritten(command: Command, folder: Path, pictures: Path) -> None:
    (folder / "table.csv").write_text("mine")
    for option in ([], ["--resume"]):
        command(pictures, *QUICK, "-o", "table.csv", *option).check_error(2, "table.csv: already exists. Give")
    assert (folder / "table.csv").read_text() == "mine"
    assert command(pictures, *QUICK, "-q", "-o", "table.csv", "--overwrite").status == 0


# Resuming


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes the third image raise an error."""
    original = Study._evaluate_item

    def stop_with(error: BaseException) -> None:
        def evaluate_item(self: Study, item: Any, *args: Any) -> StudyEntry:
            if item == self.items[2]:
                raise error
            return original(self, item, *args)

        monkeypatch.setattr(Study, "_evaluate_item", evaluate_item)

    yield stop_with
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("ending", [(KeyboardInterrupt(), 130), (TerminationSignal(), 143)])
def test_a_stopped_study_says_how_to_go_on_and_ends_as_if_it_had_not_been_stopped(
    command: Command, pictures: Path, stopped: Any, monkeypatch: pytest.MonkeyPatch, ending: tuple[BaseException, int]
) -> None:
    (error, status), folder = ending, pictures.parent
    arguments = (pictures, "--methods", "gradcam", "--metrics", "insertion,grid")
    assert command(*arguments, "-q", "-o", "whole/").status == 0
    stopped(error)
    outcome = command(*arguments, "-q", "-o", "out/")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert outcome.status == status
    assert "Stopped: 2 of 14 images and mosaics evaluated." in outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("  gradcam ")]
    assert shlex.split(line)[:3] == ["gradcam", "evaluate", "--resume"]
    assert not (folder / "out" / "results.csv").exists()
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as caught:
        gradcam.cli.main()
    assert not caught.value.code
    names = ["results.csv", "results.json", "results.tex", "examples.png"]
    if importlib.util.find_spec("matplotlib") is not None:
        names.append("curves.png")
    for name in names:
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes(), name


def test_without_an_output_a_stopped_study_is_lost(command: Command, pictures: Path, stopped: Any) -> None:
    stopped(KeyboardInterrupt())
    outcome = command(pictures, *QUICK)
    assert outcome.status == 130
    assert "Stopped: 2 of 7 images and mosaics evaluated. Without --output, these results are lost." in outcome.err


def test_a_full_disk_ends_with_status_1(command: Command, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Journal, entry: StudyEntry) -> None:
        raise gradcam.errors.OutputError("out/: no space left; free some, then go on with --resume")

    monkeypatch.setattr(Journal, "append", refuse)
    command(pictures, *QUICK, "-o", "out/", "-q").check_error(1, "no space left")


def test_results_in_the_input_folder_are_not_evaluated(command: Command, folder: Path, pictures: Path) -> None:
    assert command("pictures", *QUICK, "-q", "-o", "pictures/results/").status == 0
    before = (pictures / "results" / "results.csv").read_bytes()
    assert command("pictures", *QUICK, "-q", "-o", "pictures/results/", "--resume").status == 0
    assert (pictures / "results" / "results.csv").read_bytes() == before


@needs_matplotlib
def test_no_matplotlib(command: Command, folder: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "matplotlib" else original(name)
    )
    outcome = command(pictures / "0-red.png", "--methods", "gradcam", "--metrics", "insertion", "-o", "out/")
    assert outcome.status == 0
    assert 'Note: curves.png needs matplotlib: pip install ".[plots]"' in outcome.err
    assert "curves.png" not in files(folder / "out")


def test_help_imports_no_torch() -> None:
    import subprocess

    code = "import sys; sys.argv = ['gradcam', 'evaluate', '--help']; import gradcam.cli as c\ntry: c.main()\n"
    code += "except SystemExit: print(sorted({'torch', 'numpy', 'cv2', 'matplotlib'} & set(sys.modules)))"
    stdout = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert stdout.endswith("[]\n")
    assert "--annotations" in stdout
