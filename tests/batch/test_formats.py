"""Test user-defined result formats: from a file, from an installed package, and invalid ones."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from gradcam import plugins
from gradcam.batch.formats import FORMATS, find_format
from gradcam.cli import cli
from gradcam.errors import GradcamError
from gradcam.images.files import hash_file
from tests.batch.test_webdataset import batch, photos
from tests.cli.test_cli import Command, folder, gradcam_command

__all__ = ["batch", "folder", "gradcam_command", "photos"]  # fixtures

FORMAT_FILE = """
import zipfile
import gradcam
from gradcam.batch.formats import Format

class Zip:
    "all results in a zip"
    def __init__(self, opening):
        self.file = zipfile.ZipFile(opening.place / "all.zip", "a" if opening.mode == "resume" else "w")
    def write(self, record, files):
        if record.image == "STOP":
            raise ValueError("no room")
        for name, data in files.items():
            self.file.writestr(name, data)
    def close(self):
        self.file.close()

zipped = Format("zipped", "all results in a zip", Zip)
taken = Format("files", "another one", Zip)
odd = Format("odd", "opens nothing", lambda opening: 3)
fails = Format("fails", "does not open", lambda opening: 1 / 0)
number = 3

@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations, gradients):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)

def score(output):
    return output[:, 281]
"""


@pytest.fixture
def format_file(folder: Path) -> Path:
    path = folder / "mine.py"
    path.write_text(FORMAT_FILE)
    return path


def names(out: str) -> list[str]:
    import zipfile

    with zipfile.ZipFile(Path(out) / "all.zip") as archive:
        return sorted(archive.namelist())


@pytest.mark.parametrize("name", ["zipped", "Zip"])
def test_a_format_from_a_file_and_resuming_with_it(batch: Command, photos: Path, format_file: Path, name: str) -> None:
    arguments = ("-o", "out", "--output-format", f"mine.py:{name}")
    assert batch(photos, *arguments).status == 1
    first = names("out")
    assert len(first) == 4
    records = [json.loads(line) for line in Path("out/manifest.jsonl").read_text().splitlines()]
    assert [record["status"] for record in records].count("ok") == 4
    assert {entry["overlay"] for record in records for entry in record["explained"]} == {None}
    settings = json.loads(Path("out/run.json").read_text())["settings"]
    assert settings["output_format"] == name
    assert settings["files"] == {name: {"file": "mine.py", "sha256": hash_file(format_file)}}
    (photos / "b" / "broken.jpg").write_bytes((photos / "z.jpg").read_bytes())
    again = batch(photos, *arguments, "--resume")
    assert again.status == 0, again.err
    assert names("out") == sorted([*first, "b/broken-gradcam.jpg"]), "what was done is not done again"


@pytest.mark.parametrize(
    ("option", "name"),
    [("output-format=mine.py:zipped", "zipped"), ("method=mine.py:mycam", "mycam"), ("target=mine.py:score", "target")],
)
def test_a_file_that_changed_is_another_setting(
    batch: Command, photos: Path, format_file: Path, option: str, name: str
) -> None:
    arguments = (photos / "z.jpg", "-o", "out", f"--{option}")
    assert batch(*arguments).status == 0
    assert batch(*arguments, "--resume").status == 0
    format_file.write_text(FORMAT_FILE + "# changed")
    changed = batch(*arguments, "--resume")
    assert changed.status == 2
    assert f"had other settings: files.{name}.sha256: " in changed.err


def test_changed_options_of_a_built_in_method_are_another_setting(
    batch: Command, photos: Path, format_file: Path
) -> None:
    arguments = (photos / "z.jpg", "-o", "out", "--method", "few.py:few")
    for samples, status in ((1, 0), (2, 2)):
        line = f'few = gradcam.METHODS["smoothgradcam-pp"].using(samples={samples})'
        (format_file.parent / "few.py").write_text(f"import gradcam\n{line}\n")
        outcome = batch(*arguments, "--resume") if status else batch(*arguments)
        assert outcome.status == status, outcome.err
    assert "method_options.smoothgradcam-pp.samples: 1 → 2" in outcome.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:number", "mine.py:number is 3, expected a gradcam.batch.formats.Format, or a class with write"),
        ("mine.py:taken", "mine.py:taken: a format named 'files' already exists: choose another name"),
        ("mine.py:none", "There is no 'none' in mine.py"),
        ("mine.py:odd", "The format odd returned 3, expected an object with write(record, files) and close()"),
        ("mine.py:fails", "The format fails cannot be opened: ZeroDivisionError"),
        ("nothing.py:x", "nothing.py: does not exist"),
        ("tarball", "'tarball' is not one of 'files', 'webdataset'"),
    ],
)
def test_an_invalid_format_is_refused_in_one_line(
    batch: Command, photos: Path, format_file: Path, name: str, message: str
) -> None:
    outcome = batch(photos, "-o", "out", "--output-format", name)
    assert outcome.status == 2, outcome.err
    assert message in outcome.err.splitlines()[0]
    assert not list(Path("out").glob("*")) or batch(photos / "z.jpg", "-o", "out", "--overwrite").status == 0


@pytest.mark.parametrize(
    ("error", "message"), [('ValueError("no room")', "ValueError: no room"), ("SystemExit(3)", "SystemExit: 3")]
)
def test_a_writer_that_fails_ends_the_run_and_is_named(
    batch: Command, photos: Path, format_file: Path, error: str, message: str
) -> None:
    format_file.write_text(FORMAT_FILE.replace("STOP", "z.jpg").replace('ValueError("no room")', error))
    outcome = batch(photos, "-o", "out", "--output-format", "mine.py:zipped")
    assert outcome.status == 1
    assert f"The format zipped cannot write z.jpg: {message}" in outcome.err
    assert "z.jpg" not in [json.loads(line)["image"] for line in Path("out/manifest.jsonl").read_text().splitlines()]


def test_an_entry_point_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "not_there_at_all:x", "gradcam.formats")
    monkeypatch.setattr(plugins, "list_entry_points", lambda kind: {"broken": broken})
    with pytest.raises(GradcamError, match=r"broken \(not_there_at_all:x\) cannot be imported: .*not_there_at_all"):
        find_format("broken")
    assert find_format("files") is FORMATS["files"]


def test_a_broken_command_is_named_and_tab_goes_on(gradcam_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "not_there_at_all:x", "gradcam.commands")
    monkeypatch.setattr(plugins, "list_entry_points", lambda kind: {"broken": broken})
    outcome = gradcam_command("broken")
    assert outcome.status == 2
    assert "broken (not_there_at_all:x) cannot be imported" in outcome.err
    tab = ShellComplete(cli, {}, "gradcam", "_GRADCAM_COMPLETE").get_completions([], "r")
    assert [item.value for item in tab] == ["run", "report", "recommend"]
