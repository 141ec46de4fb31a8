"""Test WebDatasets: results as samples in tar files that the webdataset library reads, and shards as inputs."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import gradcam
from gradcam.batch.formats import Opening
from gradcam.batch.formats import webdataset as tar_results
from gradcam.batch.formats.webdataset import TarResults, name_field, plan_keys
from gradcam.errors import GradcamError, InputError, OutputError
from gradcam.sources import archives
from gradcam.sources.collect import list_inputs
from gradcam.storage.clear import ExistingRunMode
from gradcam.storage.output import DiskWriter, OutputWriter, StoreWriter, to_reader
from gradcam.storage.records import Explained, Record
from gradcam.storage.run_file import RunSettings, ShardFiles
from gradcam.storage.store import Store
from tests.cli.test_cli import Command, Photo, folder, gradcam_command
from tests.stores import objects

__all__ = ["folder", "gradcam_command"]  # fixtures

NAMES = {
    "chelsea.jpg": "chelsea.png", "macaw.webp": "b/macaw.v2.png", "koala.webp": "b/koala.png", "coffee.jpg": "z.jpg",
}  # fmt: skip


@pytest.fixture
def batch(gradcam_command: Command) -> Command:
    return lambda *arguments: gradcam_command("batch", "--device", "cpu", *arguments)


@pytest.fixture
def batch_tars(batch: Command) -> Command:
    return lambda *arguments: batch(*arguments, "--output-format", "webdataset")


@pytest.fixture
def photos(folder: Path, photo: Photo) -> Path:
    """Return a folder with four small photographs, one of them with two dots in its name, and a broken file."""
    for name, place in NAMES.items():
        path = folder / "photos" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(photo(name)).convert("RGB").reduce(4).save(path)
    (folder / "photos" / "b" / "broken.jpg").write_bytes((folder / "photos" / "z.jpg").read_bytes()[:1000])
    return folder / "photos"


def read_samples(*tars: Path) -> list[dict[str, Any]]:
    """Return the samples that the webdataset library reads; it leaves the files open."""
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        samples = list(webdataset.WebDataset([str(tar) for tar in tars], shardshuffle=False))
        gc.collect()
    return samples


def read_member(out: Path, name: str) -> bytes:
    tar, _, member = name.partition("/")
    with tarfile.open(out / tar) as archive:
        file = archive.extractfile(member)
        assert file is not None
        return file.read()


def tars(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("*.tar"))


# Output


def test_samples_contain_the_data_of_the_files(batch: Command, batch_tars: Command, photos: Path) -> None:
    options = [
        "--save",
        "overlay",
        "--save",
        "map",
        "--save",
        "panel",
        "--method",
        "gradcam",
        "--method",
        "layercam",
        "--top-k",
        "2",
    ]
    files_run, tars_run = batch(photos, "-o", "files", *options), batch_tars(photos, "-o", "out", *options)
    assert (files_run.status, tars_run.status) == (1, 1), tars_run.err
    assert tars(Path("out")) == ["results-000001.tar"]
    assert set(os.listdir("out")) == {".gradcam.lock", "log.jsonl", "manifest.jsonl", "results-000001.tar", "run.json"}
    samples = {sample["__key__"]: sample for sample in read_samples(Path("out/results-000001.tar"))}
    assert list(samples) == ["chelsea", "z", "b/koala", "b/macaw_v2"]
    by_files = {record.image: record for record in gradcam.read_manifest("files")}
    in_tars = gradcam.read_manifest("out")
    assert [record.image for record in in_tars] == list(by_files)
    for record in in_tars:
        expected = by_files[record.image]
        if record.error is not None:
            assert record == expected
            continue
        assert record.tar == "results-000001.tar"
        sample = samples[{"b/macaw.v2.png": "b/macaw_v2"}.get(record.image, record.image[:-4])]
        assert Record.from_json(sample["json"]) == record
        count = 0
        for ours, theirs in zip(record.explained, expected.explained, strict=True):
            assert (ours.label, ours.score, ours.method) == (theirs.label, theirs.score, theirs.method)
            for kind in ("overlay", "map", "panel"):
                name, file = getattr(ours, kind), getattr(theirs, kind)
                assert read_member(Path("out"), name) == Path("files", file).read_bytes()
                field = name.removeprefix(f"results-000001.tar/{sample['__key__']}.")
                assert sample[field] == Path("files", file).read_bytes()
                count += 1
        assert count == 12
        assert len({name for name in sample if not name.startswith("__")}) == 4 + 4 + 1 + 1
    facts = json.loads(Path("out/run.json").read_text())
    assert facts["settings"]["output_format"] == "webdataset"


def test_a_map_decodes(batch_tars: Command, photos: Path) -> None:
    from webdataset.autodecode import Decoder, basichandlers

    assert batch_tars(photos / "chelsea.png", "-o", "out", "--save", "map").status == 0
    (sample,) = read_samples(Path("out/results-000001.tar"))
    decoded = Decoder([basichandlers])(sample)
    assert (decoded["gradcam.npy"].dtype, decoded["gradcam.npy"].ndim) == (np.float32, 2)
    assert decoded["json"]["image"] == "chelsea.png"


def test_equal_runs_give_equal_tars_and_print_their_records(batch_tars: Command, photos: Path) -> None:
    printed = [batch_tars(photos, "-o", out, "--json").out for out in ("one", "two")]
    assert printed == [Path("one/manifest.jsonl").read_text()] * 2
    assert "results-000001.tar/chelsea.gradcam.jpg" in printed[0]
    assert Path("one/results-000001.tar").read_bytes() == Path("two/results-000001.tar").read_bytes()


def test_a_tar_ends_at_its_limit_of_images_or_bytes(batch_tars: Command, photos: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tar_results, "MAX_IMAGES_PER_TAR", 2)
    assert batch_tars(photos, "-o", "out").status == 1
    # The broken image is second: its record waits until the tar of the first image is written.
    assert [record.tar for record in gradcam.read_manifest("out")] == [
        "results-000001.tar", "results-000001.tar", None, "results-000002.tar", "results-000002.tar",
    ]  # fmt: skip
    monkeypatch.setattr(tar_results, "MAX_TAR_BYTES", 1)
    assert batch_tars(photos, "-o", "small").status == 1
    assert len(tars(Path("small"))) == 4
    assert len(read_samples(*sorted(Path("small").glob("*.tar")))) == 4


def test_shards_of_a_run_have_tars_of_their_own(batch_tars: Command, photos: Path) -> None:
    for share in ("1/2", "2/2"):
        assert batch_tars(photos, "-o", "out", "--shard", share).status in (0, 1)
    assert tars(Path("out")) == ["results-1-of-2-000001.tar", "results-2-of-2-000001.tar"]
    assert len(read_samples(*Path("out").glob("*.tar"))) == 4
    assert len(gradcam.read_manifest("out")) == 5


# Resuming


def test_a_resumed_run_continues_after_its_last_tar(batch_tars: Command, photos: Path) -> None:
    single = ("--batch-size", 1)
    assert batch_tars(photos, "-o", "whole", *single).status == 1
    stopped = batch_tars(photos, "-o", "out", "--max-failures", 0, *single)
    assert stopped.status == 1
    assert re.search("[34] of 5 images are finished", stopped.err)  # A fourth image may already have been in progress.
    first = Path("out/results-000001.tar").read_bytes()
    Image.open(photos / "z.jpg").save(photos / "b" / "broken.jpg")
    outcome = batch_tars(photos, "-o", "out", "--resume", *single)
    assert (outcome.status, outcome.err) == (0, "")
    assert Path("out/results-000001.tar").read_bytes() == first
    assert tars(Path("out")) == ["results-000001.tar", "results-000002.tar"]
    images = [record.image for record in gradcam.read_manifest("out")]
    assert images == [record.image for record in gradcam.read_manifest("whole")]
    assert len(read_samples(*sorted(Path("out").glob("*.tar")))) == 5
    again = batch_tars(photos, "-o", "out", "--resume", *single)
    assert "nothing left to do" in again.out
    assert tars(Path("out")) == ["results-000001.tar", "results-000002.tar"]


def test_images_of_a_deleted_tar_are_explained_again(batch_tars: Command, photos: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tar_results, "MAX_IMAGES_PER_TAR", 2)
    assert batch_tars(photos, "-o", "out").status == 1
    Path("out/results-000001.tar").unlink()
    assert batch_tars(photos, "-o", "out", "--resume").status == 1
    assert tars(Path("out")) == ["results-000002.tar", "results-000003.tar"]
    records = gradcam.read_manifest("out")
    assert sorted(record.image for record in records) == sorted({record.image for record in records})
    assert {record.tar for record in records} == {"results-000002.tar", "results-000003.tar", None}


def test_the_other_format_is_another_setting(batch: Command, batch_tars: Command, photos: Path) -> None:
    assert batch_tars(photos / "z.jpg", "-o", "out").status == 0
    outcome = batch(photos / "z.jpg", "-o", "out", "--resume")
    assert outcome.status == 2
    assert "other settings: output_format: webdataset → files." in outcome.err
    assert batch(photos / "z.jpg", "-o", "files").status == 0
    facts = json.loads(Path("files/run.json").read_text())
    del facts["settings"]["output_format"]  # An earlier version did not record the format.
    Path("files/run.json").write_text(json.dumps(facts))
    assert batch(photos / "z.jpg", "-o", "files", "--resume").status == 0
    outcome = batch_tars(photos / "z.jpg", "-o", "files", "--resume")
    assert "other settings: output_format: files → webdataset." in outcome.err


def test_overwriting_removes_the_tars_that_are_recorded(batch: Command, batch_tars: Command, photos: Path) -> None:
    assert batch_tars(photos, "-o", "out").status == 1
    Path("out/mine.tar").write_bytes(b"x")
    assert batch(photos / "z.jpg", "-o", "out", "--overwrite").status == 0
    assert tars(Path("out")) == ["mine.tar"]
    assert batch_tars(photos / "z.jpg", "-o", "out", "--overwrite").status == 0
    assert tars(Path("out")) == ["mine.tar", "results-000001.tar"]
    assert not Path("out/z-gradcam.jpg").exists()


def test_an_input_is_never_removed_or_replaced(batch_tars: Command, photos: Path) -> None:
    assert batch_tars(photos / "z.jpg", "-o", "out").status == 0
    tar = Path("out/results-000001.tar").read_bytes()
    outcome = batch_tars("out/results-000001.tar", "-o", "out", "--overwrite")
    assert outcome.status == 2
    assert "is an input image, but also a result of the earlier run" in outcome.err
    assert Path("out/results-000001.tar").read_bytes() == tar


def test_unrecorded_tars_are_not_added_to(batch: Command, batch_tars: Command, photos: Path) -> None:
    Path("out").mkdir()
    Path("out/results-000007.tar").write_bytes(b"somebody's")
    outcome = batch_tars(photos / "z.jpg", "-o", "out")
    assert outcome.status == 2
    assert "out/: contains results-000007.tar, which is not part of a recorded run" in outcome.err
    assert os.listdir("out") == ["results-000007.tar"]
    assert batch(photos / "z.jpg", "-o", "out").status == 0, "files are not in its way"
    assert batch_tars(photos / "z.jpg", "-o", "out", "--overwrite").status == 2
    assert Path("out/results-000007.tar").read_bytes() == b"somebody's"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are others here")
@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGINT])
def test_every_picture_is_once_in_the_manifest_and_in_the_tars_after_a_run_was_stopped(
    folder: Path, photo: Photo, stop_signal: signal.Signals
) -> None:
    picture = Image.open(photo("coffee.jpg")).convert("RGB").reduce(8)
    (folder / "in").mkdir()
    for number in range(30):
        picture.rotate(number).save(folder / "in" / f"{number:02}.jpg")
    code = (
        "import gradcam.batch.formats.webdataset as t; t.MAX_IMAGES_PER_TAR = 7\n"
        "import time, gradcam.batch.save as o; save = o.Saver.save\n"
        "o.Saver.save = lambda *a: (time.sleep(0.1), save(*a))[1]\n"
        "from gradcam.cli import main; main()"
    )
    arguments = ["batch", "in", "-o", "out", "--output-format", "webdataset", "--device", "cpu"]
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (folder / "out" / "results-000002.tar").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(stop_signal)
    process.wait()
    before = len(gradcam.read_manifest(folder / "out"))
    assert 7 <= before < 30
    subprocess.run([*command, "--resume"], cwd=folder, check=True, capture_output=True)
    assert [record.image for record in gradcam.read_manifest(folder / "out")] == [
        f"{number:02}.jpg" for number in range(30)
    ]
    samples = read_samples(*sorted((folder / "out").glob("*.tar")))
    assert sorted(sample["__key__"] for sample in samples) == [f"{number:02}" for number in range(30)]
    assert not (folder / "out" / ".gradcam-partial").exists()


# In a store


def test_samples_in_a_store_are_those_on_a_disk(batch_tars: Command, photos: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tar_results, "MAX_IMAGES_PER_TAR", 2)
    assert batch_tars(photos, "-o", "out").status == 1
    with objects():
        store = Store("objects://bucket/out")
        outcome = batch_tars(photos, "-o", store.url)
        assert outcome.status == 1
        assert [name for name in store.find() if name.endswith(".tar")] == tars(Path("out"))
        for name in tars(Path("out")):
            assert store.read(name) == Path("out", name).read_bytes()
        assert gradcam.read_manifest(store.url) == gradcam.read_manifest("out")
        Image.open(photos / "z.jpg").save(photos / "b" / "broken.jpg")
        assert batch_tars(photos, "-o", store.url, "--resume").status == 0
        assert "results-000003.tar" in store.find()
        assert len(gradcam.read_manifest(store.url)) == 5
        outcome = batch_tars(f"{store.url}/results-{{000001..000003}}.tar", "-o", store.url, "--overwrite")
        assert outcome.status == 2
        assert "is an input image, but also a result of the earlier run" in outcome.err
        assert batch_tars(photos / "z.jpg", "-o", store.url, "--overwrite").status == 0
        assert [name for name in store.find() if name.endswith(".tar")] == ["results-000001.tar"]


def test_tars_in_a_store_whose_records_were_not_written_are_not_done_again(
    batch_tars: Command, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradcam.batch.formats.store_folder import StoreResults

    monkeypatch.setattr(tar_results, "MAX_IMAGES_PER_TAR", 2)
    with objects():
        store = Store("objects://bucket/out")
        with monkeypatch.context() as patch:  # A killed process loses the records that it holds in memory.
            patch.setattr(StoreResults, "_write", lambda self: None)
            assert batch_tars(photos, "-o", store.url).status == 1
        assert "manifest/00001.jsonl" not in store.find()
        before = {name: store.read(name) for name in store.find() if name.endswith(".tar")}
        assert len(before) == 2
        assert batch_tars(photos, "-o", store.url, "--resume").status == 1
        assert {name: store.read(name) for name in store.find() if name.endswith(".tar")} == before
        assert len(gradcam.read_manifest(store.url)) == 5


# Without a model


class RunInMemory:
    """Stands in for OpenRun, and keeps its records in memory."""

    place = None
    notes = ()
    manifest = "manifest"
    failed = frozenset[str]()

    def __init__(self, done: frozenset[str] = frozenset()) -> None:
        self.done, self.records, self.order, self.closed = done, [], (), 0

    @property
    def recorded(self) -> int:
        return len(self.records)

    def append(self, record: Record, files: Mapping[str, bytes]) -> Record:
        assert files == {}
        self.records.append(record)
        return record

    def log(self, event: str, **details: Any) -> None:
        pass

    def close(self, order: Any = ()) -> None:
        self.order = order
        self.closed += 1


STEMS = {f"{number}.jpg": f"{number}" for number in range(20)}


def record(number: int) -> tuple[Record, dict[str, bytes]]:
    name = f"{number}-gradcam.jpg"
    entry = Explained(1, "x", 1.0, "l", "gradcam", name, False)
    return Record(f"{number}.jpg", "m", explained=(entry,)), {name: b"x" * number}


def failed(number: int) -> Record:
    return Record(f"{number}.jpg", "m", error="broken")


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutputWriter]:
    if request.param == "disk":
        (tmp_path / ShardFiles().temporary).mkdir()
        yield DiskWriter(tmp_path)
    else:
        with objects():
            yield StoreWriter(Store("objects://bucket/out"))


def list_outputs(place: Any) -> list[str]:
    """Return the names in the output folder, without the folder for incomplete files if it is empty."""
    temporary = ShardFiles().temporary
    names = to_reader(place.root).list_names()
    return [name for name in names if name != temporary or any((place.root / name).iterdir())]


def start(
    place: Any, mode: ExistingRunMode = "new", done: frozenset[str] = frozenset(), stems: dict[str, str] = STEMS
) -> tuple[TarResults, RunInMemory]:
    records, run = RunInMemory(done), RunSettings("cpu", "m", {}, {}, [], None, 1, 0)
    return TarResults(Opening(place.root, mode, records=records, run=run, stems=stems)), records


def test_records_are_written_after_their_tar(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_results, "MAX_IMAGES_PER_TAR", 3)
    results, run = start(place)
    results.append(failed(0), {})
    assert results.recorded == 1, "nothing keeps it"
    for number in (1, 2):
        results.append(*record(number))
    results.append(failed(3), {})
    assert (results.recorded, ShardFiles().find_tars(list_outputs(place))) == (1, [])
    results.append(*record(4))
    assert [entry.image for entry in run.records] == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "4.jpg"]
    assert ShardFiles().find_tars(list_outputs(place)) == [1]
    results.append(*record(5))
    results.close(["a"])
    results.close()
    first, second = "results-000001.tar", "results-000002.tar"
    assert [entry.tar for entry in run.records] == [None, first, first, None, first, second]
    assert (run.order, run.closed) == (["a"], 1)
    assert set(list_outputs(place)) == {"results-000001.tar", "results-000002.tar"}
    with to_reader(place.root).open("results-000001.tar") as file, tarfile.open(fileobj=io.BytesIO(file.read())) as tar:
        assert tar.getnames() == ["1.gradcam.jpg", "1.json", "2.gradcam.jpg", "2.json", "4.gradcam.jpg", "4.json"]


def test_a_run_without_results_leaves_no_tar(place: Any) -> None:
    results, run = start(place)
    results.append(failed(0), {})
    results.close()
    assert (len(run.records), list_outputs(place)) == (1, [])


def test_resuming_records_a_tar_whose_records_were_not_written(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results, run = start(place)
    for number in range(4):
        results.append(*record(number))

    def stop(record: Record, files: Any) -> Record:
        if record.image == "2.jpg":
            raise KeyboardInterrupt
        return RunInMemory.append(run, record, files)

    monkeypatch.setattr(run, "append", stop)
    with pytest.raises(KeyboardInterrupt):
        results.close()
    assert [entry.image for entry in run.records] == ["0.jpg", "1.jpg"]
    results, resumed_run = start(place, "resume", frozenset({"0.jpg", "1.jpg"}))
    assert [entry.image for entry in resumed_run.records] == ["2.jpg", "3.jpg"]
    assert results.done == {"0.jpg", "1.jpg", "2.jpg", "3.jpg"}
    results.append(*record(5))
    results.close()
    assert resumed_run.records[-1].tar == "results-000002.tar"
    for mode in ("new", "overwrite"):
        with pytest.raises(OutputError, match=r"contains results-000001\.tar, which is not part of a recorded run"):
            start(place, mode)  # type: ignore[arg-type]


def test_several_tars_whose_records_were_lost_are_recorded_once(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store writes many records at a time, so the records of several tars can be lost together."""
    monkeypatch.setattr(tar_results, "MAX_IMAGES_PER_TAR", 2)
    results, _ = start(place)
    for number in range(7):
        results.append(*record(number))
    results.close()
    opened = []
    read = tar_results._read_records
    monkeypatch.setattr(tar_results, "_read_records", lambda tars, name: opened.append(name) or read(tars, name))
    results, resumed_run = start(place, "resume", frozenset({"0.jpg", "1.jpg", "2.jpg"}))
    assert [entry.image for entry in resumed_run.records] == ["3.jpg", "4.jpg", "5.jpg", "6.jpg"]
    assert [entry.tar for entry in resumed_run.records] == [f"results-00000{number}.tar" for number in (2, 3, 3, 4)]
    assert len(opened) == 4, "up to one that is recorded, in which the others end"
    results, resumed_run = start(place, "resume", results.done)
    assert (resumed_run.records, opened[4:]) == ([], ["results-000004.tar"])


def test_a_run_does_not_continue_after_a_foreign_tar(tmp_path: Path) -> None:
    place = DiskWriter(tmp_path, tmp_path)
    for data in (b"", b"nonsense" * 200):
        (tmp_path / "results-000003.tar").write_bytes(data)
        with pytest.raises(
            OutputError, match=r"results-000003\.tar: is not a tar file with this run's results .*; move this file"
        ):
            start(place, "resume")
    with tarfile.open(tmp_path / "results-000003.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("x.json"))
    with pytest.raises(OutputError, match="is not a tar file with this run's results"):
        start(place, "resume")


def test_a_truncated_sample_is_in_no_tar(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from webdataset import TarWriter

    write = TarWriter.write
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        results, run = start(place)
        results.append(*record(1))

        def fail(self: Any, sample: Any, error: BaseException = error) -> int:
            write(self, {"__key__": "half", "jpg": b"x"})
            raise error

        monkeypatch.setattr(TarWriter, "write", fail)
        with pytest.raises((OutputError, KeyboardInterrupt)) as caught:
            results.append(*record(2))
        has_advice = "free some space, then continue with --resume" in str(caught.value)
        assert has_advice or isinstance(error, KeyboardInterrupt)
        monkeypatch.setattr(TarWriter, "write", write)
        results.close()
        assert (run.records, run.closed, list_outputs(place)) == ([], 1, [])


def test_a_tar_that_cannot_be_moved_to_its_place(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results, run = start(place)
    results.append(*record(1))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    monkeypatch.setattr(Store, "upload", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Access Denied")))
    with pytest.raises(OutputError, match="--resume|--output"):
        results.close()
    assert (run.records, run.closed, list_outputs(place)) == ([], 1, [])


def test_keys_have_no_dots_and_are_unique() -> None:
    stems = {"1": "a", "2": "b/x.y", "3": "b/x_y", "4": "c.d/e", "5": "b/X.y", "6": ".hidden", "7": "b/x_y-2"}
    assert plan_keys(stems) == {
        "1": "a", "2": "b/x_y-3", "3": "b/x_y", "4": "c.d/e", "5": "b/X_y-4", "6": "_hidden", "7": "b/x_y-2",
    }  # fmt: skip


def test_fields_are_the_part_after_a_stem() -> None:
    assert name_field("A", "A-gradcam-285-Egyptian_cat.jpg") == "gradcam-285-egyptian_cat.jpg"
    assert name_field("b/x.y", "b/x.y-gradcam.jpg") == "gradcam.jpg"
    assert name_field("a", "a-gradcam-281-tabby-layer4.1.npy") == "gradcam-281-tabby-layer4.1.npy"
    assert name_field("b/long", "b/lo-12345678-gradcam.jpg") == "lo-12345678-gradcam.jpg"


def test_long_and_non_ascii_names_are_preserved(place: Any) -> None:
    stem = "ordner/" * 20 + "猫é" * 20
    results, _ = start(place, stems={"x.jpg": stem})
    entry = Explained(1, "x", 1.0, "l", "gradcam", f"{stem}-gradcam.jpg", False)
    results.append(Record("x.jpg", "m", explained=(entry,)), {f"{stem}-gradcam.jpg": b"data"})
    results.close()
    with to_reader(place.root).open("results-000001.tar") as file:
        data = io.BytesIO(file.read())
    import webdataset
    from webdataset.tariterators import group_by_keys, tar_file_expander

    (sample,) = group_by_keys(tar_file_expander([{"url": "x", "stream": data}]))
    assert (sample["__key__"], sample["gradcam.jpg"]) == (stem, b"data")
    assert webdataset


# Refused options


def test_unsupported_options_are_refused_at_once(batch_tars: Command, photos: Path, monkeypatch: Any) -> None:
    outcome = batch_tars(photos, "-o", "out", "--report")
    assert outcome.status == 2
    assert "--report needs files, but --output-format webdataset writes none" in outcome.err
    monkeypatch.setitem(sys.modules, "webdataset", None)
    outcome = batch_tars(photos, "-o", "out")
    assert outcome.status == 2
    assert 'pip install ".[webdataset]"' in outcome.err
    assert not Path("out").exists()


def test_no_report_is_made_of_tars(batch_tars: Command, gradcam_command: Command, photos: Path) -> None:
    assert batch_tars(photos / "z.jpg", "-o", "out").status == 0
    outcome = gradcam_command("report", "out")
    assert outcome.status == 2
    assert "tar files such as results-000001.tar, which a report cannot read" in outcome.err


# Input


def make_shard(samples: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in samples.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


SHARDS = {
    f"shard-{number:06}.tar": {
        f"x/{number}a.jpg": b"one", f"x/{number}a.cls": b"3", f"x/{number}a.json": b"{}",
        f"{number}b.left.png": b"two", f"{number}b.right.png": b"three", f"{number}b.txt": b"a caption",
    }
    for number in range(8, 12)
}  # fmt: skip


@pytest.fixture(params=["disk", "store"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with objects():
        for name, samples in SHARDS.items():
            (tmp_path / name).write_bytes(make_shard(samples))
            Store("objects://bucket/data").write(name, make_shard(samples))
        yield str(tmp_path) if request.param == "disk" else "objects://bucket/data"


def test_shards_by_braces(shards: str) -> None:
    listing = list_inputs(f"{shards}/shard-{{000008..000011}}.tar")
    members = [(f"{shard}/{name}", data) for shard, samples in SHARDS.items() for name, data in samples.items()]
    images = [(name, data) for name, data in members if name.endswith(("jpg", "png"))]
    assert [(item.name, item.content.read()) for item in listing.items] == images
    assert listing.left_out == 0, "fields of samples are not files that were left out"
    names = [item.name for item in list_inputs(f"{shards}/shard-{{000010,000008}}.tar").items]
    assert [name.partition("/")[0] for name in names[::3]] == ["shard-000010.tar", "shard-000008.tar"]
    assert len(list_inputs(f"{shards}/*-{{000010,000008}}.tar").items) == 6
    with pytest.raises(InputError, match=r"shard-000012\.tar: does not exist"):
        list_inputs(f"{shards}/shard-{{000010..000012}}.tar")


def test_fields_without_an_image_are_omitted(tmp_path: Path) -> None:
    samples = {"a.jpg": b"x", "a.json": b"x", "b.json": b"x", "x/a.txt": b"x", "README": b"x"}
    (tmp_path / "a.tar").write_bytes(make_shard(samples))
    listing = list_inputs(tmp_path / "a.tar")
    assert ([item.name for item in listing.items], listing.left_out) == (["a.jpg"], 3)


def test_braces_that_match_no_shard_are_a_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "webdataset", None)
    (tmp_path / "{a,b}.jpg").write_bytes(b"x")
    (tmp_path / "{1..2}.tar").write_bytes(make_shard({"a.jpg": b"x"}))
    (tmp_path / "a{1}.tar").write_bytes(make_shard({"b.jpg": b"x"}))
    for name, inside in (("{a,b}.jpg", "{a,b}.jpg"), ("{1..2}.tar", "a.jpg"), ("a{1}.tar", "b.jpg")):
        assert [item.name for item in list_inputs(tmp_path / name).items] == [inside]
    with pytest.raises(GradcamError, match=r'pip install "\.\[webdataset\]"'):
        list_inputs(tmp_path / "{3..4}.tar")


def test_many_shards_in_a_store_are_listed_in_parallel_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = []
    list_archive = archives.list_archive

    def record_listing(address: str) -> Any:
        listings.append((address, threading.current_thread().name))
        time.sleep(0.01 if address.endswith("8.tar") else 0)
        return list_archive(address)

    monkeypatch.setattr(archives, "list_archive", record_listing)
    with objects():
        for name, samples in SHARDS.items():
            Store("objects://bucket").write(name, make_shard(samples))
        pattern = "objects://bucket/shard-{000008..000011}.tar"
        names = [item.name for item in list_inputs([pattern, pattern]).items]
        assert [name.partition("/")[0] for name in names[::3]] == list(SHARDS)
        assert len(listings) == 4
        assert threading.main_thread().name not in {thread for _, thread in listings}
        Store("objects://bucket").write("shard-000009.tar", b"nonsense" * 100)
        with pytest.raises(InputError, match=r"shard-000009\.tar: this archive is damaged"):
            list_inputs(pattern)


def test_written_tars_can_be_read_as_input(batch_tars: Command, photos: Path) -> None:
    assert batch_tars(photos, "-o", "out").status == 1
    listing = list_inputs("out/results-{000001..000001}.tar")
    assert [item.name for item in listing.items] == [
        "chelsea.gradcam.jpg", "z.gradcam.jpg", "b/koala.gradcam.jpg", "b/macaw_v2.gradcam.jpg",
    ]  # fmt: skip
    assert listing.left_out == 0
    assert batch_tars("out/results-{000001..000001}.tar", "-o", "again").status == 0
    assert read_samples(Path("again/results-000001.tar"))[0]["__key__"] == "chelsea_gradcam"


def test_a_store_that_refuses_tars_is_reported_as_for_files() -> None:
    with objects() as fs:
        fs.failures.append(PermissionError(errno.EACCES, "Access Denied"))
        with pytest.raises(OutputError) as caught:
            start(StoreWriter(Store("objects://bucket/out")))
    assert str(caught.value) == (
        "objects://bucket/out/: the credentials do not allow listing, reading or writing it (Access Denied); use "
        "other credentials, or choose another --output"
    )
