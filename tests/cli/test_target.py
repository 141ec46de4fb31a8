"""Test `--target FILE.py:NAME`, a user-defined target function, in `run` and `batch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradcam
from gradcam.errors import GradcamError
from tests.cli.test_cli import Command, Photo, folder, gradcam_command, run, small

__all__ = ["folder", "gradcam_command", "run", "small"]  # fixtures

TARGETS = """
def score(output):
    return output[:, 281]

def two(output):
    return output[:, [281, 967]]

number = 3
class Kind: pass
"""


@pytest.fixture
def target_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TARGETS)
    return f"{tmp_path}/mine.py"


def test_a_function_of_one_logit_is_that_class(run: Command, small: Photo, folder: Path, target_file: str) -> None:
    path = small("cat_and_espresso.jpg")
    assert run(path, "--class", "281", "-o", "class.png", "-q").status == 0
    result = run(path, "--target", f"{target_file}:score", "--json")
    (entry,) = json.loads(result.out)["explained"]
    assert (entry["index"], entry["label"]) == (None, "score")
    assert entry["overlay"] == "cat_and_espresso-gradcam-score.png"
    assert Path(entry["overlay"]).read_bytes() == Path("class.png").read_bytes()


def test_a_target_module_with_several_methods(gradcam_command: Command, small: Photo, folder: Path) -> None:
    (folder / "ours_to_find.py").write_text(TARGETS)
    outcome = gradcam_command("compare", small("coffee.jpg"), "--target", "ours_to_find:score", "--json")
    assert outcome.status == 0, outcome.err
    methods = [entry["method"] for entry in json.loads(outcome.out)["explained"]]
    assert "gradcam" in methods
    assert "finercam" not in methods, "it compares classes"


def test_two_scores_are_two_results(run: Command, small: Photo, folder: Path, target_file: str) -> None:
    assert run(small("coffee.jpg"), "--target", f"{target_file}:two", "-q").status == 0
    assert sorted(path.name for path in folder.iterdir()) == ["coffee-gradcam-two_0.png", "coffee-gradcam-two_1.png"]


def test_batches_resume_the_same_file(gradcam_command: Command, small: Photo, folder: Path, target_file: str) -> None:
    photos = small("coffee.jpg").parent
    arguments = ("batch", photos, "-o", "out", "--target", f"{target_file}:score", "--device", "cpu")
    assert gradcam_command(*arguments).status == 0
    manifest = Path("out/manifest.jsonl").read_bytes()
    assert json.loads(manifest)["explained"][0]["label"] == "score"
    assert gradcam_command(*arguments, "--resume").status == 0
    assert Path("out/manifest.jsonl").read_bytes() == manifest
    Path(target_file).write_text(TARGETS.replace("281", "282"))
    refused = gradcam_command(*arguments, "--resume")
    assert refused.status == 2
    assert "mine.py" in refused.err or "files" in refused.err


def test_from_python(small: Photo) -> None:
    path = small("coffee.jpg")
    (by_function,) = gradcam.explain_files(path, target=lambda output: output[:, 504])
    (by_index,) = gradcam.explain_files(path, target=504)
    key = ("layer4", "gradcam")
    assert by_function.explanations[key].classes is None
    assert by_function.explanations[key].maps.equal(by_index.explanations[key].maps)
    assert by_function.predictions == by_index.predictions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "MINE:score", "--class", "281"), "--target replaces --class, --top-k and --score"),
        (("--target", "MINE:score", "--top-k", "2"), "--target replaces --class, --top-k and --score"),
        (("--target", "MINE:number"), "mine.py:number is 3: expected a function"),
        (("--target", "~no.such/mine.py:score"), "~no.such/mine.py: does not exist"),
        (("--target", "MINE:Kind"), "Kind'>: expected a function"),
        (("--target", "MINE:nothing"), "There is no 'nothing' in"),
        (("--target", "nowhere.py:score"), "nowhere.py: does not exist"),
        (("--target", "score"), "There is no entry point 'score' in the group gradcam.targets"),
    ],
)
def test_wrong_target(run: Command, small: Photo, target_file: str, arguments: tuple[str, ...], message: str) -> None:
    result = run(small("coffee.jpg"), *(argument.replace("MINE", target_file) for argument in arguments))
    result.check_error(2, message)
    assert len(result.err.splitlines()) <= 2


def test_a_function_that_fails_or_gives_no_score(run: Command, small: Photo, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "def odd(output):\n    return output[0, 0]\n\ndef bad(output):\n    return 1 / 0\n"
    )
    path = small("coffee.jpg")
    for name in ("odd", "bad"):
        result = run(path, "--target", f"{tmp_path}/odd.py:{name}")
        assert result.status == 1
        assert result.err.startswith(f"{path}: ")
    with pytest.raises(GradcamError):
        gradcam.load_classifier().explain(path, target=lambda output: output[0, 0])
