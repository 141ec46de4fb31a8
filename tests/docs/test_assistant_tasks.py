"""Test the twenty tasks for coding agents: stubs fail, reference answers pass, and answers with one mistake fail."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FOLDER = ROOT / "scripts/assistant_tasks"
TASKS = sorted(path.name for path in (FOLDER / "tasks").iterdir() if path.is_dir())
ANSWERS = Path(__file__).parent / "assistant_answers"
PACKAGES = {"10_clip_sentence": "transformers", "20_paper_figure": "matplotlib"}

# One plausible mistake per task: a part of the reference answer, what takes its place, and the reason to expect.
MISTAKES = {
    "01_training_script": ("explanation = gradcam", "model.eval()\n        explanation = gradcam", "losses differ"),
    "02_blank_map": (".maps[:, 0]", ".heatmaps[:, 0]", "has the shape"),
    "03_wrong_prediction": ("--mean 0.5,0.5,0.5 --std 0.5,0.5,0.5 ", "", "predicts 'too bright'"),
    "04_uniform_map": ('LAYER = "neck"', 'LAYER = "body"', "LAYER is 'body'"),
    "05_detector_box": ("Box(1)", "Box(0)", "not the second box"),
    "06_multi_label": ("target=[present]", "target=[present[::-1]]", "map of"),
    "07_regression": ('evidence="signed"', 'evidence="positive"', "map differs"),
    "08_batch_folder": ("--resume", "--overwrite", "wrote earlier files again"),
    "09_transformer_tokens": ("tokens[:, 1:16]", "tokens[:, 3:]", "map differs"),
    "10_clip_sentence": ('method="gradcam"', 'method="hirescam"', "correlation"),
    "11_segmentation_mask": ("Mask(target, box)", "lambda output: output[:, target].mean((1, 2))", "mean logits"),
    "12_video_frames": ("argmax()", "argmin()", "not the strongest"),
    "13_own_preprocessing": (
        "region=(0, width // 3, height, width // 3)",
        "region=(0, 0, height, width)",
        "to the left",
    ),
    "14_two_inputs": ("target=targets", "target=targets[0]", "map differs"),
    "15_sixteen_bits": ("explain(scan,", 'explain(__import__("cv2").imread(scan)[..., :1],', "probability"),
    "16_ci_gate": ("--fail-on undecided", "--fail-on failed", "exit status is 0"),
    "17_move_and_compare": (" - output[:, 0]", "", "differs"),
    "18_small_gpu": ("batch_size=3", "batch_size=4", "4 images at a time"),
    "19_box_from_heatmap": ("threshold=0.5", "threshold=0.9", "IoU"),
    "20_paper_figure": (" {probabilities[k]:.0%}", "", "does not contain"),
}


def run_checks(folder: Path, *options: str) -> dict[str, str]:
    """Run the checks on a folder of answers, and return the reason for each failure, "" for an answer that passed."""
    command = [sys.executable, str(FOLDER / "run"), str(folder), "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == (0 if all(record["passed"] for record in records) else 1), ended.stderr
    return {record["task"]: record["reason"] for record in records}


def write_answers(folder: Path, mistakes: bool) -> list[str]:
    """Write the reference answers whose packages are installed, and return their tasks."""
    names = [name for name in TASKS if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name])]
    for name in names:
        text = (ANSWERS / f"{name}.py").read_text(encoding="utf-8")
        if mistakes:
            old, new, _ = MISTAKES[name]
            assert old in text, name
            text = text.replace(old, new)
        (folder / name).mkdir()
        (folder / name / "answer.py").write_text(text, encoding="utf-8")
    return names


def test_there_are_twenty_tasks_each_with_a_check_an_answer_and_a_mistake() -> None:
    assert len(TASKS) == 20
    assert [path.stem for path in sorted((FOLDER / "checks").glob("[0-9]*.py"))] == TASKS
    assert [path.stem for path in sorted(ANSWERS.glob("*.py"))] == TASKS == list(MISTAKES)
    diagnoses = [name for name in TASKS if "CAUSES = [" in (FOLDER / "tasks" / name / "answer.py").read_text("utf-8")]
    assert len(diagnoses) == 3


@pytest.mark.parametrize("name", TASKS)
def test_a_task_does_not_contain_its_answer(name: str) -> None:
    """Test that neither the statement nor the stub imports the package or calls one of its functions."""
    for path in (FOLDER / "tasks" / name).iterdir():
        assert not re.search(r"import gradcam|gradcam\.\w+\(", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("path", sorted((FOLDER / "checks").glob("*.py")), ids=lambda path: path.stem)
def test_a_check_shares_no_code_with_the_package(path: Path) -> None:
    assert not re.search(r"^\s*(import|from) gradcam", path.read_text(encoding="utf-8"), re.M)


@pytest.mark.slow
def test_every_stub_fails() -> None:
    reasons = run_checks(FOLDER / "tasks")
    assert list(reasons) == TASKS
    assert [name for name, reason in reasons.items() if not reason] == []


@pytest.mark.slow
def test_every_reference_answer_passes(tmp_path: Path) -> None:
    names = write_answers(tmp_path, mistakes=False)
    assert run_checks(tmp_path, "--only", *names) == dict.fromkeys(names, "")


@pytest.mark.slow
def test_an_answer_with_a_mistake_fails_for_this_reason(tmp_path: Path) -> None:
    names = write_answers(tmp_path, mistakes=True)
    reasons = run_checks(tmp_path, "--only", *names)
    unexpected = {name: reasons[name] for name in names if MISTAKES[name][2] not in reasons[name]}
    assert unexpected == {}


def test_a_missing_answer_counts_as_a_failure(tmp_path: Path) -> None:
    (tmp_path / TASKS[0]).mkdir()
    assert run_checks(tmp_path, "--only", "01") == {TASKS[0]: "answer.py is missing"}


def test_an_answer_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    (tmp_path / TASKS[0]).mkdir()
    (tmp_path / TASKS[0] / "answer.py").write_text("while True:\n    pass\n")
    assert run_checks(tmp_path, "--only", "01", "--seconds", "4") == {TASKS[0]: "no result after 4 s"}


def test_a_folder_without_answers_is_an_error(tmp_path: Path) -> None:
    for command in ([str(tmp_path)], [str(FOLDER / "tasks"), "--only", "99"]):
        ended = subprocess.run(
            [sys.executable, str(FOLDER / "run"), *command], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 2
        assert "01_training_script" in ended.stderr


def test_the_tasks_can_be_copied_without_their_checks(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "tasks", tmp_path / "answers")
    names = {path.name for path in (tmp_path / "answers").rglob("*") if path.is_file()}
    assert names <= {"task.md", "answer.py", "network.py", "train.py"}
