"""Test `gradcam batch` and `gradcam report`, with interruptions, broken files and lost results."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gradcam
from gradcam.batch.formats.folder import OutputFolder
from gradcam.batch.save import Saver
from gradcam.cli._settings import OutputMode
from gradcam.cli._terminal import Display, TerminationSignal, format_resume
from gradcam.storage.records import Record
from tests.cli.test_cli import POSIX, Command, Photo, files, folder, gradcam_command, pixels, records

__all__ = ["folder", "gradcam_command"]  # fixtures

PLACES = {
    "chelsea.jpg": "chelsea.png", "macaw.webp": "macaw.png", "koala.webp": "b/koala.png", "panda.webp": "b/panda.png",
    "coffee.jpg": "c/coffee.jpg",
}  # fmt: skip


@pytest.fixture
def batch(gradcam_command: Command) -> Command:
    """Return a function that runs `gradcam batch` on the CPU."""
    return lambda *arguments: gradcam_command("batch", "--device", "cpu", *arguments)


@pytest.fixture
def photos(folder: Path, photo: Photo) -> Path:
    """Return a folder with five small photos, a broken copy of one, and two files that are skipped."""
    root = folder / "photos"
    for name, place in PLACES.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(photo(name)).convert("RGB").reduce(2).save(path)
    (root / "b" / "broken.jpg").write_bytes((root / "c" / "coffee.jpg").read_bytes()[:2000])
    (root / "notes.txt").write_text("nothing to see")
    (root / ".hidden.png").write_bytes((root / "macaw.png").read_bytes())
    return root


ORDER = ["chelsea.png", "macaw.png", "b/broken.jpg", "b/koala.png", "b/panda.png", "c/coffee.jpg"]


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files that must not depend on interruptions. The log is left out, because it contains times."""
    return {
        name: (folder / name).read_bytes() for name in files(folder) if not Path(name).name.startswith(("log", "."))
    }


# Results


def test_a_folder_is_explained_under_the_same_relative_names(
    batch: Command, folder: Path, photos: Path, classifier: gradcam.Classifier
) -> None:
    outcome = batch("photos", "-o", "out", "--layer", "layer4", "--format", "png", "--batch-size", 8)
    assert outcome.status == 1
    result = [name for name in ORDER if "broken" not in name]
    overlays = [name.rsplit(".", 1)[0] + "-gradcam.png" for name in result]
    assert [name for name in files(folder / "out") if name.endswith(".png")] == sorted(overlays)
    rows = manifest(folder / "out")
    assert [(record["image"], record["status"]) for record in rows] == [
        (name, "failed" if "broken" in name else "ok") for name in ORDER
    ]
    assert [record["explained"][0]["overlay"] for record in rows if record["explained"]] == overlays
    explanation = classifier.explain([photos / name for name in result], "layer4")
    for i, name in enumerate(overlays):
        np.testing.assert_array_equal(pixels(folder / "out" / name), explanation.overlay(i))


def test_broken_files_are_named_at_the_end_and_others_counted(batch: Command, photos: Path) -> None:
    outcome = batch("photos", "-o", "out")
    assert re.fullmatch(
        r"5 images explained, 1 failed, 1 non-image file ignored   \(\d+\.\d s, \d+\.\d images per second\)\n  →  out\n",
        outcome.out,
    ), outcome.out
    assert re.fullmatch(r"b/broken\.jpg: is damaged or cut off \(.+\)\n", outcome.err), outcome.err


def test_the_manifest_equals_run_json(gradcam_command: Command, batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out", "--batch-size", 1, "--top-k", 2)
    plain = gradcam_command("run", "--device", "cpu", "--json", "--top-k", 2, *(photos / name for name in ORDER))
    for batch_record, plain_record in zip(manifest(folder / "out"), records(plain)):
        for record in (batch_record, plain_record):
            record["error"] = str(record["error"]).removeprefix(f"{photos}/")
            record.pop("image")
            for entry in record["explained"]:  # type: ignore[union-attr,attr-defined]
                entry["overlay"] = Path(entry["overlay"]).stem
        assert batch_record == plain_record


def test_json_prints_the_records_and_nothing_else(batch: Command, folder: Path, photos: Path) -> None:
    outcome = batch("photos", "-o", "out", "--json")
    assert outcome.out == (folder / "out" / "manifest.jsonl").read_text()


def test_of_many_failures_the_first_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(OutputMode(as_json=False, quiet=False), 25, 0)
    for number in range(22):
        display.add(Record(f"{number}.jpg", "m", error=f"{number}.jpg: is empty"))
    display.print_failures("out/manifest.jsonl")
    display.print_summary("out", left_out=0, report=None)
    message = capsys.readouterr()
    *failures, last = message.err.splitlines()
    assert failures == [f"{number}.jpg: is empty" for number in range(20)]
    assert last == "... and 2 more failed images, listed in out/manifest.jsonl."
    assert message.out.startswith("0 images explained, 22 failed   (")
    assert display.failed > 0


def test_quiet_says_what_is_broken_alone(batch: Command, photos: Path) -> None:
    outcome = batch("photos", "-o", "out", "--quiet")
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("b/broken.jpg: ")


def test_several_kinds_of_files(batch: Command, folder: Path, photos: Path, classifier: gradcam.Classifier) -> None:
    options = (
        "--method gradcam --method layercam -c koala -c macaw --save overlay --save heatmap --save map --save panel"
    )
    assert batch("photos/b/koala.png", "-o", "out", *options.split()).status == 0
    (record,) = manifest(folder / "out")
    entries = record["explained"]
    assert [(entry["method"], entry["label"]) for entry in entries] == [
        (method, label) for method in ("gradcam", "layercam") for label in ("koala", "macaw")
    ]
    expected = classifier.compare(
        photos / "b" / "koala.png", layers=["layer4"], methods=["gradcam", "layercam"], target=[["koala", "macaw"]]
    )
    for entry in entries:
        k = ["koala", "macaw"].index(entry["label"])
        values = expected["layer4", entry["method"]].maps[0, k].numpy()
        np.testing.assert_array_equal(np.load(folder / "out" / entry["map"]), values)
        assert all((folder / "out" / entry[kind]).stat().st_size > 1000 for kind in ("overlay", "heatmap", "panel"))
    assert len({entry["panel"] for entry in entries}) == 1


def test_a_list_says_which_class_of_each(batch: Command, folder: Path, photos: Path) -> None:
    (folder / "chosen.csv").write_text(
        "image,class\nphotos/b/koala.png,macaw\nphotos/macaw.png,\nphotos/b/panda.png,105\n"
    )
    assert batch("chosen.csv", "-o", "out").status == 0
    rows = manifest(folder / "out")
    assert [(record["image"], record["explained"][0]["index"]) for record in rows] == [
        ("b/koala.png", 88),
        ("macaw.png", 88),
        ("b/panda.png", 105),
    ]
    assert rows[1]["predictions"][0]["label"] == "macaw"
    batch("chosen.csv", "-o", "other", "-c", "koala").check_error(2, "The list already names the classes to explain")
    assert not (folder / "other").exists()


def test_a_list_that_asks_for_other_classes_is_refused(batch: Command, folder: Path, photos: Path) -> None:
    listed = folder / "chosen.csv"
    listed_rows = ["photos/b/koala.png,macaw\n", "photos/macaw.png,\n"]
    listed.write_text("image,class\n" + "".join(listed_rows))
    assert batch("chosen.csv", "-o", "out").status == 0
    before = tree(folder / "out")
    for changed_rows, message in (
        (["photos/b/koala.png,koala\n", listed_rows[1]], r"explained 'macaw' in b/koala\.png, but now .* 'koala'"),
        (["photos/b/koala.png,\n", "photos/macaw.png,macaw\n"], "explained 'macaw' in b/koala.*gives no class"),
        (["photos/b/koala.png\n", "photos/macaw.png\n"], "listed_classes: true → false"),
    ):
        listed.write_text("image,class\n" + "".join(changed_rows))
        outcome = batch("chosen.csv", "-o", "out", "--resume")
        assert outcome.status == 2
        assert re.search(message, outcome.err)
        assert tree(folder / "out") == before
    listed.write_text("image,class\n" + "".join(listed_rows) + "photos/b/panda.png,105\n")
    assert batch("chosen.csv", "-o", "out", "--resume").status == 0
    assert [record["explained"][0]["index"] for record in manifest(folder / "out")] == [88, 88, 105]


def test_a_class_that_there_is_not(batch: Command, folder: Path, photos: Path) -> None:
    (folder / "chosen.csv").write_text("photos/b/koala.png,koalla\n")
    outcome = batch("chosen.csv", "-o", "out")
    outcome.check_error(2, "koala")
    assert outcome.err.count("\n") == 1


def test_an_archive_is_a_folder(batch: Command, folder: Path, photos: Path) -> None:
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for name in ORDER:
            archive.write(photos / name, name)
    batch("photos", "-o", "one")
    assert batch("photos.zip", "-o", "two").status == 1
    from_folder, from_zip = tree(folder / "one"), tree(folder / "two")
    assert from_folder.pop("run.json") != from_zip.pop("run.json")
    assert from_folder == from_zip


def test_the_sums_of_the_inputs(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out", "--audit")
    for record in manifest(folder / "out"):
        assert record["sha256"] == hashlib.sha256((photos / record["image"]).read_bytes()).hexdigest()


def test_run_json_has_what_the_results_depend_on(batch: Command, folder: Path, photos: Path, photo: Photo) -> None:
    batch("photos", "-o", "out", "--alpha", 0.25)
    run = json.loads((folder / "out" / "run.json").read_text())
    assert run["versions"]["torch"] == torch.__version__
    assert (run["settings"]["alpha"], run["settings"]["layers"], run["settings"]["batch_size"]) == (0.25, ["layer4"], 8)
    weights = Path(gradcam.__file__).parent / "models" / "embedded"
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights.rglob("*") if path.is_file()]
    assert run["model"]["weights"]["sha256"] in sums or run["model"]["weights"]["of"] == "tensors"
    assert str(folder) not in (folder / "out" / "run.json").read_text()


def test_a_report_at_once_or_later(gradcam_command: Command, batch: Command, folder: Path, photos: Path) -> None:
    outcome = batch("photos", "-o", "out", "--report")
    assert "out/index.html" in outcome.out
    page = (folder / "out" / "index.html").read_bytes()
    (folder / "out" / "index.html").unlink()
    again = gradcam_command("report", "out")
    assert (again.status, again.err) == (0, "")
    assert (folder / "out" / "index.html").read_bytes() == page


def test_a_failed_report_keeps_all(batch: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gradcam.report.report_folder.ReportFolder.write", full)
    outcome = batch("photos", "-o", "out", "--report")
    assert outcome.status == 1
    assert "b/broken.jpg: is damaged or cut off" in outcome.err
    assert "out: the report cannot be written (No space left on device)\n" in outcome.err
    assert outcome.err.rstrip().splitlines()[-1].startswith("  gradcam batch --resume --device cpu photos -o out")
    assert len(manifest(folder / "out")) == 6


def test_a_report_of_nothing(gradcam_command: Command, folder: Path) -> None:
    (folder / "empty").mkdir()
    for place in ("empty", "missing"):
        outcome = gradcam_command("report", place)
        assert outcome.status == 2
        assert outcome.err.count("\n") == 1


# Errors before the first image


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty", "-o", "out"], "no images"),
        (["missing", "-o", "out"], "does not exist"),
        (["photos", "-o", "photos/macaw.png"], "is a file"),
        (["photos"], "Missing option '-o'"),
        (["photos", "-o", "out", "--resume", "--overwrite"], "give only one of them"),
        (["photos", "-o", "out", "--max-failures", "many"], "expected a number of images"),
        (["photos", "-o", "out", "--shard", "3/2"], "3"),
        (["photos", "-o", "out", "-c", "koalla"], "koala"),
        (["photos", "-o", "out", "-l", "layer9"], "layer9"),
    ],
)
def test_wrong_usage(batch: Command, folder: Path, photos: Path, arguments: list[str], message: str) -> None:
    (folder / "empty").mkdir()
    before = files(folder)
    outcome = batch(*arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert files(folder) == before


def test_a_used_folder_is_refused(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out")
    before = tree(folder)
    batch("photos", "-o", "out").check_error(2, "--resume", "--overwrite")
    assert tree(folder) == before


def test_other_settings_are_refused_and_named(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out")
    before = tree(folder)
    outcome = batch("photos", "-o", "out", "--resume", "--alpha", 0.3, "--method", "layercam")
    assert outcome.status == 2
    assert re.search(r"alpha.*0\.8.*0\.3", outcome.err)
    assert re.search(r"methods.*gradcam.*layercam", outcome.err)
    assert "colormap" not in outcome.err
    assert tree(folder) == before


def test_the_interpolation_is_recorded_and_checked(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out", "--interpolation", "nearest")
    complete = tree(folder / "out")
    assert json.loads(complete["run.json"])["settings"]["interpolation"] == "nearest"
    truncate(folder / "out")
    refused = batch("photos", "-o", "out", "--resume")
    assert (refused.status, "interpolation: nearest → bicubic" in refused.err) == (2, True)
    batch("photos", "-o", "out", "--resume", "--interpolation", "nearest")
    resumed = tree(folder / "out")
    for name in complete.keys() - {"log.jsonl"}:
        assert resumed[name] == complete[name]


def truncate(folder: Path, *unrecorded: str) -> None:
    """Leave only the first record of a run and its files, and remove settings that earlier versions did not record."""
    lines = (folder / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "manifest.jsonl").write_bytes(lines[0])
    for line in lines[1:]:
        for entry in json.loads(line)["explained"]:
            (folder / entry["overlay"]).unlink()
    run = json.loads((folder / "run.json").read_text())
    for name in unrecorded:
        del run["settings"][name]
    (folder / "run.json").write_text(json.dumps(run, indent=2) + "\n")


@pytest.mark.parametrize(
    ("made_with", "settings", "other"),
    [
        (
            ("--base", "color"), {"alpha": 0.5, "colormap": "turbo", "base": "color", "blend": "fade"}, ("base", "gray"),
        ),
        ((), {"interpolation": "bicubic"}, ("interpolation", "bilinear")),
    ],
    ids=["base", "interpolation"],
)  # fmt: skip
def test_an_earlier_run_resumes_with_its_look(
    batch: Command, photos: Path, made_with: Sequence[str], settings: dict[str, Any], other: tuple[str, str]
) -> None:
    folder = photos.parent
    batch("photos", "-o", "out", *made_with)
    complete = tree(folder / "out")
    assert json.loads(complete["run.json"])["settings"].items() >= settings.items()
    new_settings = settings.keys() & {"base", "blend", "interpolation"}  # Earlier versions did not record these.
    truncate(folder / "out", *new_settings)
    option, value = other
    refused = batch("photos", "-o", "out", "--resume", f"--{option}", value)
    assert (refused.status, f"{option}: {settings[option]} → {value}" in refused.err) == (2, True)
    batch("photos", "-o", "out", "--resume")
    resumed = tree(folder / "out")
    for name in complete.keys() - {"run.json", "log.jsonl"}:
        assert resumed[name] == complete[name]


def test_a_resumed_run_keeps_its_look(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out", "--blend", "uniform", "--alpha", 0.3, "--colormap", "jet")
    complete = tree(folder / "out")
    truncate(folder / "out")
    batch("photos", "-o", "out", "--resume")
    resumed = tree(folder / "out")
    for name in complete.keys() - {"log.jsonl"}:
        assert resumed[name] == complete[name]


def test_overwriting_removes_what_was_written_and_nothing_else(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out", "--report")
    (folder / "out" / "mine.txt").write_text("keep")
    assert batch("photos/b", "-o", "out", "--overwrite", "--method", "layercam").status == 1
    remaining = set(files(folder / "out")) - {"log.jsonl", ".gradcam.lock", ".gradcam-report.lock"}
    assert remaining == {"koala-layercam.jpg", "panda-layercam.jpg", "manifest.jsonl", "run.json", "mine.txt"}


def test_a_page_of_somebody_else_is_neither_removed_nor_replaced(
    gradcam_command: Command, batch: Command, folder: Path, photos: Path
) -> None:
    user_files = {
        "index.html": b"my page",
        "report/mine.css": b"my style",
        "report/details-mine/notes.txt": b"my notes",
    }
    batch("photos/c", "-o", "out")
    for name, data in user_files.items():
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).write_bytes(data)
    assert batch("photos/c", "-o", "out", "--overwrite").status == 0
    before = tree(folder / "out")
    assert {name: before.get(name) for name in user_files} == user_files
    for refused in (batch("photos/c", "-o", "out", "--overwrite", "--report"), gradcam_command("report", "out")):
        refused.check_error(2, "index.html: is not a gradcam report, but a report would replace it")
        assert tree(folder / "out") == before
    (folder / "out" / "index.html").unlink()
    assert gradcam_command("report", "out").status == 0
    assert (folder / "out" / "report/details-mine/notes.txt").read_bytes() == b"my notes"


def test_an_output_folder_inside_the_input_is_left_out(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "photos/out", "--format", "png")
    first = manifest(photos / "out")
    assert batch("photos", "-o", "photos/out", "--format", "png", "--overwrite").status == 1
    assert manifest(photos / "out") == first


# Stopping and resuming


def test_resuming_gives_the_same_bytes(batch: Command, folder: Path, photos: Path) -> None:
    """Cut the manifest at several places, lose some overlays, and resume."""
    batch("photos", "-o", "whole", "--batch-size", 4)
    expected = tree(folder / "whole")
    text = expected["manifest.jsonl"]
    for cut in (0, 1, len(text) // 3, len(text) // 2, len(text) - 1, len(text)):
        (folder / "whole" / "manifest.jsonl").write_bytes(text[:cut])
        (folder / "whole" / "b" / "koala-gradcam.jpg").unlink()
        (folder / "whole" / "macaw-gradcam.jpg").write_bytes(b"")
        assert batch("photos", "-o", "whole", "--batch-size", 4, "--resume").status == 1
        assert tree(folder / "whole") == expected


def test_nothing_is_done_twice(batch: Command, folder: Path, photos: Path) -> None:
    (photos / "b" / "broken.jpg").unlink()
    batch("photos", "-o", "out")
    before = {
        name: (folder / "out" / name).stat().st_mtime_ns for name in files(folder / "out") if name.endswith(".jpg")
    }
    outcome = batch("photos", "-o", "out", "--resume")
    assert outcome.status == 0
    assert outcome.out.startswith("0 images explained, 5 explained in an earlier run")
    after = {name: (folder / "out" / name).stat().st_mtime_ns for name in before}
    assert before == after


def test_a_mended_picture_is_tried_again(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out", "--batch-size", 2)
    (photos / "b" / "broken.jpg").write_bytes((photos / "c" / "coffee.jpg").read_bytes())
    assert batch("photos", "-o", "out", "--batch-size", 2, "--resume").status == 0
    assert [record["image"] for record in manifest(folder / "out")] == ORDER
    assert {record["status"] for record in manifest(folder / "out")} == {"ok"}


def test_failures_may_end_it(batch: Command, folder: Path, photos: Path) -> None:
    for limit, max_failures in (("0", 0), ("10%", 0), ("1", 1), ("20%", 1)):
        outcome = batch("photos", "-o", "out", "--max-failures", limit, "--overwrite", "--batch-size", 1)
        assert outcome.status == 1
        stopped = "Stopped after 1 failure:" in outcome.err
        assert stopped == (max_failures == 0)
        # When the run stops, the next batch may already be in progress.
        assert len(manifest(folder / "out")) in ((3, 4) if stopped else (6,))
        assert ("--resume" in outcome.err) == stopped


@pytest.mark.parametrize("limit", ["0", "5%"])
def test_the_line_of_a_run_with_too_many_failures_leads_to_its_end(
    gradcam_command: Command, batch: Command, folder: Path, photos: Path, limit: str
) -> None:
    (photos / "c" / "broken.jpg").write_bytes(b"no picture")
    # With batches of one image, few are in progress when the run stops.
    outcome = batch("photos", "-o", "out", "--max-failures", limit, "--batch-size", 1)
    stops = 0
    while "To resume:" in outcome.err:
        assert outcome.status == 1
        assert stops < 2, "each stop is for a failure that was not known"
        stops += 1
        stopped_rows = manifest(folder / "out")
        overlays = {entry["overlay"] for record in stopped_rows for entry in record["explained"]}
        assert overlays == {name for name in files(folder / "out") if name.endswith(".jpg")}, "an overlay has no record"
        outcome = gradcam_command(*shlex.split(outcome.err.splitlines()[-1])[1:])
        resumed = manifest(folder / "out")
        assert {record["image"] for record in stopped_rows} <= {record["image"] for record in resumed}, (
            "a record was lost"
        )
    assert stops, "one failure is more than none"
    assert outcome.status == 1
    assert [record["image"] for record in manifest(folder / "out")] == sorted([*ORDER, "c/broken.jpg"], key=to_rank)


def to_rank(name: str) -> tuple[object, ...]:
    return (name.count("/"), name.split("/"))


def test_earlier_failures_are_kept(batch: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch("photos", "-o", "out")
    before = manifest(folder / "out")
    monkeypatch.setattr("gradcam.batch.pipeline.read_item", interrupt)
    assert batch("photos", "-o", "out", "--resume").status == 130
    assert sorted(map(str, manifest(folder / "out"))) == sorted(map(str, before))


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_what_was_written_when_a_run_was_interrupted_has_its_record(
    batch: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Semaphore(0)
    actual_save, actual_add = Saver.save, Display.add

    def save(*arguments: Any) -> Any:
        outcome = actual_save(*arguments)
        written.release()
        return outcome

    def add(*_: Any) -> None:
        # Wait until all five valid images, which are in one batch, are saved.
        for _ in range(5):
            assert written.acquire(timeout=60)
        monkeypatch.setattr(Display, "add", actual_add)
        raise KeyboardInterrupt

    monkeypatch.setattr(Saver, "save", save)
    monkeypatch.setattr(Display, "add", add)
    outcome = batch("photos", "-o", "out")
    assert outcome.status == 130
    overlays = {entry["overlay"] for record in manifest(folder / "out") for entry in record["explained"]}
    assert overlays == {name for name in files(folder / "out") if name.endswith(".jpg")}
    assert len(overlays) >= 4


def test_behind_the_last_picture_there_is_nothing_to_stop(batch: Command, photos: Path) -> None:
    outcome = batch("photos/b/broken.jpg", "-o", "out", "--max-failures", 0)
    assert outcome.status == 1
    assert outcome.err.count("\n") == 1
    assert re.match(r"0 images explained, 1 failed   \(\d+\.\d s, ", outcome.out)


def test_shares_of_one_folder(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "whole")
    for shard in ("1/3", "2/3", "3/3"):
        assert batch("photos", "-o", "out", "--shard", shard).status in (0, 1)
    assert {name for name in files(folder / "out") if name.endswith(".jpg")} == {
        name for name in files(folder / "whole") if name.endswith(".jpg")
    }
    assert sorted(record.image for record in gradcam.read_manifest(folder / "out")) == sorted(ORDER)
    again = batch("photos", "-o", "out", "--shard", "2/3")
    assert again.status == 2
    resharded = batch("photos", "-o", "out", "--shard", "1/2")
    assert resharded.status == 2


def test_the_line_to_resume() -> None:
    typed = ["batch", "my photos/", "-o", "out", "--overwrite", "--layer", "layer4"]
    line = format_resume(typed)
    assert shlex.split(line) == ["gradcam", "batch", "--resume", "my photos/", "-o", "out", "--layer", "layer4"]
    assert format_resume(shlex.split(line)[1:]) == line


@pytest.mark.parametrize("name", ["it's", "two\nlines", "\x1b[2Jclear", "ä\udce9", "a\\b'\x07", "{1..3}", "$HOME *"])
def test_the_line_to_resume_is_quoted_for_the_shell_and_printable(name: str) -> None:
    line = format_resume(["batch", name, "-o", "out"])
    assert all(character.isprintable() for character in line)
    shell = f"gradcam() {{ printf '%s\\0' \"$@\"; }}; {line}"
    stdout = subprocess.run(["bash", "-c", shell.encode()], capture_output=True, check=True).stdout
    assert stdout.split(b"\0")[:-1] == [b"batch", b"--resume", os.fsencode(name), b"-o", b"out"]


def test_resuming_a_piped_list(batch: Command, photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("photos/b/broken.jpg\nphotos/macaw.png\n")
    with open(names) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        outcome = batch("-", "-o", "out", "--max-failures", 0, "--batch-size", 1)
    if "finished" in outcome.err:  # The second image may already be finished.
        assert "To resume, with the same list on standard input:\n  gradcam batch --resume" in outcome.err


@pytest.mark.parametrize("name", ["run.json", "manifest.jsonl"])
def test_what_somebody_removes_while_it_runs_is_told_of_and_nothing_is_lost(
    batch: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = Display.add

    def add(display: Display, record: Record) -> None:
        original(display, record)
        (folder / "out" / name).unlink(missing_ok=True)
        monkeypatch.setattr(Display, "add", original)

    batch("photos", "-o", "whole")
    monkeypatch.setattr(Display, "add", add)
    outcome = batch("photos", "-o", "out")
    assert outcome.status == 1
    if name == "run.json":
        assert "run.json: another program removed this file during the run. gradcam wrote it again." in outcome.err
    else:
        assert "manifest.jsonl: another program removed or changed this file" in outcome.err
        assert batch("photos", "-o", "out", "--resume").status == 1
    assert tree(folder / "out") == tree(folder / "whole")


def start(photos: Path, *arguments: str, before: Sequence[str] = (), **streams: int) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "gradcam", "batch", "photos", "-o", "out", "--device", "cpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(command, cwd=photos.parent, text=True, env=environment, **pipes)


def wait_for_records(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        path = folder / "manifest.jsonl"
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    pytest.fail("no record was written in two minutes")


@pytest.fixture
def many(photos: Path) -> Path:
    (photos / "b" / "broken.jpg").unlink()
    for number in range(35):
        name = [item for item in ORDER if "broken" not in item][number % 5]
        (photos / f"more-{number:02}{Path(name).suffix}").write_bytes((photos / name).read_bytes())
    return photos


def test_a_disk_that_fails_is_told_of_once(batch: Command, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("gradcam.storage.manifest.ManifestWriter.append", fail)
    monkeypatch.setattr("gradcam.storage.manifest.ManifestWriter.sync", fail)
    outcome = batch("photos", "-o", "out")
    assert outcome.status == 1
    reason, count, line = outcome.err.splitlines()
    assert reason == "out/: input/output error; check the disk, then continue with --resume"
    assert count == "0 of 6 images are finished. To resume:"
    assert line.startswith("  gradcam batch --resume")


@pytest.mark.parametrize(
    "where", ["gradcam.cli._terminal.Display.add", "gradcam.batch.formats.folder.OutputFolder.append"]
)
@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, 130), (TerminationSignal, 143), (BrokenPipeError, 1)]
)
def test_nobody_is_at_work_in_a_folder_that_is_let_go_of(
    *,
    batch: Command,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[BaseException],
    status: int,
) -> None:
    def stop(*_: Any) -> None:
        raise error

    def close(folder: OutputFolder, *_: Any) -> None:
        at_work.extend(item.name for item in threading.enumerate() if item.name.startswith("gradcam-pixels"))
        closed.append(folder)
        original(folder)

    at_work: list[str] = []
    closed: list[OutputFolder] = []
    original = OutputFolder.close
    monkeypatch.setattr(where, stop)
    monkeypatch.setattr(OutputFolder, "close", close)
    monkeypatch.setattr("gradcam.cli._discard_output", lambda: None)
    assert batch("photos", "-o", "out", "--batch-size", 2).status == status
    assert closed
    assert at_work == []


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_it_cleanly(batch: Command, folder: Path, many: Path, number: int) -> None:
    process = start(many, "--batch-size", "2")
    wait_for_records(folder / "out", 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1].strip()
    assert line.startswith("gradcam batch --resume photos -o out")
    result = len(manifest(folder / "out"))
    assert 3 <= result < 40
    # The signal may arrive after the last record is written and before it is counted.
    assert any(f"{count} of 40 images are finished" in err for count in (result - 1, result))
    assert not [name for name in files(folder / "out") if name.endswith(".tmp")]
    assert batch(*shlex.split(line)[2:]).status == 0
    batch("photos", "-o", "whole", "--batch-size", 2)
    assert tree(folder / "out") == tree(folder / "whole")


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_impatience_prints_no_traceback(folder: Path, many: Path, number: int) -> None:
    process = start(many, "--batch-size", "2")
    wait_for_records(folder / "out", 3)
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.01)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (128 + number, -number)  # A shell reports the same status for both.
    assert "Traceback" not in err


@POSIX
@pytest.mark.slow
def test_nohup_is_heeded(folder: Path, many: Path) -> None:
    process = start(many, "--batch-size", "2", before=["nohup"])
    wait_for_records(folder / "out", 3)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert len(manifest(folder / "out")) == 40


@POSIX
@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_it_cleanly(folder: Path, many: Path) -> None:
    controller, terminal = os.openpty()
    process = start(many, "--batch-size", "2", "--quiet", stdout=terminal, stderr=terminal)
    os.close(terminal)
    wait_for_records(folder / "out", 3)
    os.close(controller)  # Writing to the terminal fails from here on.
    process.send_signal(signal.SIGHUP)  # The system sends it to the processes of a closed terminal.
    assert process.wait(timeout=300) == 129
    assert 3 <= len(manifest(folder / "out")) < 40
    assert not [name for name in files(folder / "out") if name.endswith(".tmp")]


@POSIX
@pytest.mark.slow
def test_killed_again_and_again(batch: Command, folder: Path, many: Path) -> None:
    batch("photos", "-o", "whole", "--batch-size", 3)
    for records_before in (1, 17):
        process = start(many, "--batch-size", "3", "--resume")
        wait_for_records(folder / "out", records_before)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert batch("photos", "-o", "out", "--batch-size", 3, "--resume").status == 0
    assert tree(folder / "out") == tree(folder / "whole")
    assert not (folder / "out" / ".gradcam-partial").exists()


@POSIX
def test_a_run_resumes_after_a_full_disk(gradcam_command: Command, batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "whole", "--batch-size", 2)
    (folder / "out").mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "out"], check=False).returncode
    ):
        pytest.skip("a small disk can be made by root alone")
    try:
        outcome = batch("photos", "-o", "out", "--batch-size", 2)
        assert outcome.status == 1
        lines = outcome.err.splitlines()
        assert "out/: no space left on device; free some space, then continue with --resume" in lines
        assert lines[-1].strip().startswith("gradcam batch --resume --device cpu photos -o out")
        recorded = manifest(folder / "out")
        assert len(recorded) < 6
        assert f"{len(recorded)} of 6 images are finished" in outcome.err
        overlays = [entry["overlay"] for record in recorded for entry in record["explained"]]
        expected = tree(folder / "whole")
        for name in overlays:
            assert (folder / "out" / name).read_bytes() == expected[name]
        assert {name for name in files(folder / "out") if name.endswith(".jpg")} <= set(expected)
        subprocess.run(["mount", "-o", "remount,size=8m", "out"], check=True)
        assert batch("photos", "-o", "out", "--batch-size", 2, "--resume").status == 1
        assert tree(folder / "out") == expected
    finally:
        subprocess.run(["umount", "out"], check=True)


def test_memory_for_no_image(batch: Command, folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(gradcam.Classifier, "run_plan", fail)
    outcome = batch("photos/b/koala.png", "photos/macaw.png", "-o", "out")
    assert outcome.status == 1
    assert outcome.out.startswith("0 images explained, 2 failed")
    assert len(outcome.err.splitlines()) == 2
    assert all("does not fit into memory, even at batch size 1" in line for line in outcome.err.splitlines())
    halved = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert [(line["pictures"], line["from_now_on"]) for line in halved if line["event"] == "out of memory"] == [(2, 1)]


# Boxes and masks


def test_boxes_and_masks_of_processes_shards_and_archives_are_the_same(
    batch: Command, folder: Path, photos: Path
) -> None:
    def list_boxes(place: str) -> dict[str, Any]:
        """Return the boxes of each image's results. Other batches may move an edge by a pixel."""
        return {
            record.image.rpartition("photos.zip/")[2]: [
                (entry.label, [pytest.approx(box, abs=2) for box in entry.boxes or ()]) for entry in record.explained
            ]
            for record in gradcam.read_manifest(place)
        }

    save = ("--save", "boxes,mask", "--class", "koala", "--class", "macaw")
    batch("photos", "-o", "whole", *save)
    expected = {
        record.image: [(entry.label, [*(entry.boxes or ())]) for entry in record.explained]
        for record in gradcam.read_manifest("whole")
    }
    masks = sorted(path.relative_to(folder / "whole") for path in (folder / "whole").rglob("*-mask.png"))
    batch("photos", "-o", "processes", *save, "--processes", "2")
    for shard in ("1/2", "2/2"):
        batch("photos", "-o", "shards", *save, "--shard", shard)
    with zipfile.ZipFile("photos.zip", "w") as archive:
        for path in sorted(photos.rglob("*.*")):
            archive.write(path, path.relative_to(photos).as_posix())
    batch("photos.zip", "-o", "archive", *save)
    assert len(masks) == 2 * (len(expected) - 1) == 10
    for place in ("processes", "shards", "archive"):
        assert list_boxes(place) == expected, place
        for name in masks:
            assert (pixels(folder / place / name) != pixels(folder / "whole" / name)).mean() < 0.01


def test_a_run_with_boxes_resumes_and_makes_lost_masks_again(batch: Command, folder: Path, photos: Path) -> None:
    save = ("--save", "boxes,mask")
    batch("photos", "-o", "out", *save)
    before = (folder / "out/manifest.jsonl").read_bytes()
    masks = sorted((folder / "out").rglob("*-mask.png"))
    data = masks[0].read_bytes()
    masks[0].unlink()
    again = batch("photos", "-o", "out", *save, "--resume")
    assert again.out.startswith("1 image explained")
    assert (masks[0].read_bytes(), (folder / "out/manifest.jsonl").read_bytes()) == (data, before)
    other = batch("photos", "-o", "out", *save, "--box-threshold", "0.5", "--resume")
    other.check_error(2, "box_threshold: 0.3 → 0.5")
    settings = json.loads((folder / "out/run.json").read_text())["settings"]
    assert (settings["box_threshold"], settings["box_method"]) == (0.3, "largest")
    batch("photos/c", "-o", "plain")
    assert "box_threshold" not in json.loads((folder / "plain/run.json").read_text())["settings"]


def test_boxes_alone_write_no_files(batch: Command, folder: Path, photos: Path) -> None:
    batch("photos", "-o", "out", "--save", "boxes")
    assert {Path(name).suffix for name in files(folder / "out")} <= {".json", ".jsonl", ".lock"}
    again = batch("photos", "-o", "out", "--save", "boxes", "--resume")
    assert "explained in an earlier run" in again.out
