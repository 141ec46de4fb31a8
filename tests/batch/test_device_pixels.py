"""Pixels on the device, which the processor stands in for: the same results, bad pictures, and a device that fails."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import gradcam
from gradcam.batch import compute, device
from gradcam.batch.device import DevicePixels, MemoryGate, find_pixels
from gradcam.batch.engine import Work, explain_here
from gradcam.batch.findings import Request
from gradcam.batch.names import Saving
from gradcam.batch.save import Saver
from gradcam.errors import DeviceError, GradcamError
from gradcam.images.jpeg import Codec, find_codec
from gradcam.models import device as devices
from gradcam.sources.contents import Item
from gradcam.storage.records import Report
from tests.batch.test_pipeline import Content, _leaves_no_trace, noises, pixel_threads, tiny, within
from tests.cli.test_cli import Command, Photo, folder, gradcam_command, pixels

__all__ = ["_leaves_no_trace", "folder", "gradcam_command"]  # fixtures

NAMES = ("cat_and_espresso.jpg", "koala.webp", "camera.png", "chelsea.jpg", "lemur.webp", "macaw.webp", "coffee.jpg")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
NVJPEG: dict[str, Any] = {"codec": 4, "probability": 0.03}
CODEC = find_codec(torch.device("cpu"))
if CODEC is None:
    pytest.skip("torchvision before 0.20 decodes no lists of JPEG files", allow_module_level=True)

Events = list[tuple[str, dict[str, Any]]]


def jpeg(picture: Image.Image, **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, options.pop("format", "jpeg"), **options)
    return file.getvalue()


def bad_pictures(photo: Photo) -> dict[str, bytes]:
    """Of every kind that a device does not take, among those that it does."""
    colours = Image.open(photo("coffee.jpg")).convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6
    plain = jpeg(colours, quality=90)
    frame = plain.index(b"\xff\xc0")
    deep = (np.asarray(colours.convert("L")).astype(np.uint16) * 257)[:300, :400]
    return {
        "00.jpg": plain,
        "01-grey.jpg": jpeg(colours.convert("L")),
        "02-progressive.jpg": jpeg(colours, progressive=True),
        "03-cmyk.jpg": jpeg(colours.convert("CMYK")),
        "04-arithmetic.jpg": plain[: frame + 1] + b"\xc9" + plain[frame + 2 :],
        "05-cut.jpg": plain[: len(plain) // 2],
        "06-damaged.jpg": plain[:9000] + bytes(2000) + plain[11000:],
        "07-turned.jpg": jpeg(colours, exif=turned),
        "08-deep.png": jpeg(Image.fromarray(deep), format="png"),
        "09-rgb.jpg": jpeg(colours, keep_rgb=True),
        "10-empty.jpg": b"",
        "11-text.jpg": b"no picture",
        "12-transparent.png": jpeg(colours.convert("RGBA"), format="png"),
        "13.jpg": jpeg(colours.resize((400, 300))),
    }


def items_of(contents: dict[str, bytes]) -> list[Item]:
    return [Item(name, Content(data)) for name, data in contents.items()]


def photographs(photo: Photo) -> list[Item]:
    return [Item(name, Content(path=photo(name))) for name in NAMES]


def explain(
    classifier: gradcam.Classifier,
    items: Sequence[Item],
    *,
    pixels: str = "device",
    batch_size: int = 4,
    told: Events | None = None,
    **saving: Any,
) -> list[Report]:
    """The records, with the files of each."""
    work = Work(classifier, Request(layers=[classifier.layer]), items, batch_size, workers=2, pixels=pixels)
    stems = {item.name: item.name for item in items}
    saver = Saver(None, stems, Saving(**saving), classifier, work.request)

    def tell(event: str, **details: Any) -> None:
        if told is not None:
            told.append((event, details))

    return list(explain_here(work, saver, is_needed=lambda item: True, log_event=tell))


def overlays(report: Report) -> list[np.ndarray]:
    return [np.array(Image.open(BytesIO(data)).convert("RGB")).astype(int) for data in report.files.values()]


def assert_alike(
    ours: Sequence[Report], theirs: Sequence[Report], *, codec: float = 1.0, probability: float = 0.005
) -> None:
    """Compare reports; `codec` is how much the pixels of two encoders may differ, in the mean.

    Where `probability` lets two classes change places, their overlays are not compared.
    """
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert (one.record.image, one.record.error) == (other.record.image, other.record.error)
        assert (one.record.size, one.record.region) == (other.record.size, other.record.region)
        assert list(one.files) == list(other.files)
        if one.record.error is None:
            first, second = one.record.explained[0], other.record.explained[0]
            top, next_ = (prediction.probability for prediction in other.record.predictions[:2])
            if first.index != second.index and top - next_ <= 2 * probability:
                continue
            assert (first.index, first.blank, first.overlay) == (second.index, second.blank, second.overlay)
            for message, expected in zip(one.record.predictions, other.record.predictions):
                assert abs(message.probability - expected.probability) <= probability
            for drawn, wanted in zip(overlays(one), overlays(other)):
                assert abs(drawn - wanted).mean() <= codec


def load(device: str) -> gradcam.Classifier:
    return gradcam.load_classifier(device=device)


class TestEquality:
    @pytest.mark.parametrize("device", DEVICES)
    def test_classes_probabilities_and_overlays_are_those_of_the_processor(self, photo: Photo, device: str) -> None:
        items = photographs(photo)
        theirs = explain(load("cpu"), items, pixels="cpu", format="png")
        ours = explain(load(device), items, format="png")
        assert all(report.record.error is None for report in ours)
        # The photographs' chroma is halved: nvJPEG repeats it for the pixels between, and libjpeg interpolates.
        assert_alike(ours, theirs, **({"codec": 0.2} if device == "cpu" else NVJPEG))
        if (
            device == "cpu"
        ):  # what is decoded is the same, and PNG loses nothing; the maps differ by the rounding of inputs
            pairs = [(one, other) for a, b in zip(ours, theirs) for one, other in zip(overlays(a), overlays(b))]
            assert max((abs(one - other) > 2).mean() for one, other in pairs) <= 1e-3

    @pytest.mark.parametrize("device", DEVICES)
    def test_jpeg_is_encoded_on_the_device(self, photo: Photo, device: str) -> None:
        items = photographs(photo)
        theirs = explain(load("cpu"), items, pixels="cpu", quality=95)
        assert_alike(explain(load(device), items, quality=95), theirs, **({"codec": 2} if device == "cpu" else NVJPEG))

    @pytest.mark.parametrize("device", DEVICES)
    def test_files_of_whole_chroma_are_decoded_alike(self, photo: Photo, device: str) -> None:
        items = items_of({name: jpeg(Image.open(photo(name)).convert("RGB"), subsampling=0) for name in NAMES})
        theirs = explain(load("cpu"), items, pixels="cpu", format="png")
        assert_alike(explain(load(device), items, format="png"), theirs, codec=0.7)

    def test_pictures_from_python(self, photo: Photo, classifier: gradcam.Classifier) -> None:
        paths = [photo(name) for name in NAMES]
        pair = [gradcam.explain_files(paths, classifier, pixels=pixels, batch_size=3) for pixels in ("device", "cpu")]
        for ours, theirs in zip(*pair):
            one, other = (next(iter(item.explanations.values())) for item in (ours, theirs))
            assert isinstance(one.images[0], np.ndarray)
            assert np.array_equal(one.images[0], other.images[0])
            assert one.heatmaps.device.type == "cpu"
            assert torch.equal(one.classes, other.classes)
            assert (one.probabilities() - other.probabilities()).abs().max() <= 0.005
            assert one.overlay().shape == other.overlay().shape

    @pytest.mark.parametrize(
        "kinds", [("heatmap",), ("overlay", "map"), ("panel",), ("overlay", "heatmap", "map", "panel")]
    )
    def test_what_is_not_drawn_there_is_drawn_as_always(self, photo: Photo, kinds: Any) -> None:
        items = photographs(photo)[:2]
        made = [explain(load("cpu"), items, pixels=pixels, kinds=kinds) for pixels in ("device", "cpu")]
        for ours, theirs in zip(*made):
            assert list(ours.files) == list(theirs.files)
            assert ours.record.explained[0].panel == theirs.record.explained[0].panel

    def test_results_do_not_depend_on_what_is_left_to_do(self, photo: Photo, classifier: gradcam.Classifier) -> None:
        full = {report.record.image: report for report in explain(classifier, photographs(photo))}
        work = Work(classifier, Request(layers=["layer4"]), photographs(photo), 4, workers=3, pixels="device")
        saver = Saver(None, {name: name for name in NAMES}, Saving(), classifier, work.request)
        some = explain_here(
            work, saver, is_needed=lambda item: item.name in NAMES[1::2], log_event=lambda event, **details: None
        )
        for report in some:
            assert report.record == full[report.record.image].record
            assert report.files == full[report.record.image].files


@pytest.mark.parametrize("device", DEVICES)
def test_bad_pictures_in_the_middle_of_a_batch(photo: Photo, device: str) -> None:
    items = items_of(bad_pictures(photo))
    theirs = explain(load("cpu"), items, pixels="cpu", batch_size=8)
    ours = explain(load(device), items, batch_size=8)
    failed = [report.record.image for report in ours if report.record.error]
    known = [name for name in failed if "arithmetic" not in name]  # which not every build of Pillow decodes
    assert known == ["05-cut.jpg", "10-empty.jpg", "11-text.jpg"]
    if device == "cuda":  # of what is damaged, each decoder makes something else
        ours, theirs = ([item for item in value if "damaged" not in item.record.image] for value in (ours, theirs))
    assert_alike(ours, theirs, **({"codec": 2} if device == "cpu" else NVJPEG))


def failing(
    stage: str, error: Callable[[], Exception], most: int
) -> tuple[Codec, Callable[..., Any], Callable[..., Any]]:
    """The codec, `resize` and `overlay`, one of which cannot do more than so many pictures at once."""

    def guard(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(pictures: Any, *given: Any, **options: Any) -> Any:
            if name == stage and len(pictures) > most:
                raise error()
            return work(pictures, *given, **options)

        return guarded

    codec = replace(CODEC, decode=guard("decode", CODEC.decode), encode=guard("encode", CODEC.encode))
    return codec, guard("resize", device.on_device.resize), guard("draw", device.on_device.overlay)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def break_(stage: str, error: Callable[[], Exception], most: int) -> None:
        codec, resize, overlay = failing(stage, error, most)
        monkeypatch.setattr(device, "find_codec", lambda place: codec)
        monkeypatch.setattr(device.on_device, "resize", resize)
        monkeypatch.setattr(device.on_device, "overlay", overlay)

    return break_


def copies(photo: Photo, count: int = 8) -> list[Item]:
    return [Item(f"{i}.jpg", Content(photo("coffee.jpg").read_bytes())) for i in range(count)]


NO_ROOM: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory"),
    lambda: RuntimeError("CUDA error: out of memory"),
]


@pytest.mark.parametrize("stage", ["decode", "resize", "draw", "encode"])
class TestNoRoom:
    @pytest.mark.slow
    @pytest.mark.parametrize("error", NO_ROOM)
    def test_a_stage_is_halved_and_says_so(self, photo: Photo, breaking: Any, stage: str, error: Any) -> None:
        expected = explain(tiny(), copies(photo), batch_size=8)
        breaking(stage, error, most=3)
        messages: Events = []
        explanation = explain(tiny(), copies(photo), batch_size=8, told=messages)
        halved = [details for event, details in messages if event == "out of memory"]
        assert halved == [
            {"stage": stage, "pictures": 8, "from_now_on": 4},
            {"stage": stage, "pictures": 4, "from_now_on": 2},
        ]
        assert [report.record for report in explanation] == [report.record for report in expected]
        assert [report.files for report in explanation] == [report.files for report in expected]

    def test_what_does_not_fit_even_alone_is_the_processors(self, photo: Photo, breaking: Any, stage: str) -> None:
        expected = explain(tiny(), copies(photo, 3), pixels="cpu", batch_size=3)
        breaking(stage, NO_ROOM[0], most=0)
        messages: Events = []
        assert_alike(explain(tiny(), copies(photo, 3), batch_size=3, told=messages), expected)
        moved = [details for event, details in messages if event == "moved to the CPU"]
        assert moved == [{"stage": stage, "why": "out of memory"}] * 3

    def test_what_the_device_refuses_is_the_processors(self, photo: Photo, breaking: Any, stage: str) -> None:
        expected = explain(tiny(), copies(photo, 5), pixels="cpu", batch_size=5)
        breaking(stage, lambda: RuntimeError("Failed to decode batch: 3"), most=1)
        messages: Events = []
        assert_alike(explain(tiny(), copies(photo, 5), batch_size=5, told=messages), expected)
        assert [event for event, _ in messages if event != "batch"] == []  # one by one, none was refused


def test_one_that_is_refused_in_the_middle(photo: Photo, classifier: gradcam.Classifier, monkeypatch: Any) -> None:
    def refuse(files: Sequence[Tensor], is_grey: bool) -> list[Tensor]:
        if len({len(file) for file in files} & {len(photo("chelsea.jpg").read_bytes())}):
            raise RuntimeError("Error while decoding JPEG images: nvjpeg 4")
        return CODEC.decode(files, is_grey)

    expected = explain(classifier, photographs(photo), batch_size=7)
    monkeypatch.setattr(device, "find_codec", lambda place: replace(CODEC, decode=refuse))
    messages: Events = []
    explanation = explain(classifier, photographs(photo), batch_size=7, told=messages)
    assert_alike(explanation, expected)
    assert [details for event, details in messages if event != "batch"] == [{"stage": "decode", "why": "refused"}]


def test_nothing_else_begins_on_a_stream_while_its_codec_is_at_work(photo: Photo, monkeypatch: Any) -> None:
    """It writes, from a stream of its own, to memory that was free when it was asked: another thread may not use that."""
    inside: Counter[str] = Counter()
    overlaps: set[str] = set()

    def alone(stream: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **options: Any) -> Any:
            inside[stream] += 1
            time.sleep(0.02)
            if inside[stream] > 1:
                overlaps.add(stream)
            actual = work(*given, **options)
            inside[stream] -= 1
            return actual

        return watched

    codec = replace(CODEC, decode=alone("prepare", CODEC.decode), encode=alone("draw", CODEC.encode))
    monkeypatch.setattr(device, "find_codec", lambda place: codec)
    monkeypatch.setattr(device.on_device, "resize", alone("prepare", device.on_device.resize))
    monkeypatch.setattr(device.on_device, "overlay", alone("draw", device.on_device.overlay))
    assert len(explain(tiny(), copies(photo, 12), batch_size=2)) == 12
    assert overlaps == set()


class TestInFlight:
    def test_batches_come_in_in_order_while_there_is_room(self) -> None:
        gate, started = MemoryGate(100), []  # type: ignore[var-annotated]
        for number, size in ((1, 60), (2, 70), (0, 30), (3, 500), (4, 1)):
            gate.enter(number, size, lambda number=number: started.append(number))  # type: ignore[misc]
        assert started == [0, 1]
        gate.leave(30)
        assert started == [0, 1]
        gate.leave(60)
        assert started == [0, 1, 2]
        gate.leave(70)
        assert started == [0, 1, 2, 3]  # too large for the budget, and alone
        gate.leave(500)
        assert started == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("workers", [1, 4])
    def test_no_more_pixels_are_there_than_the_budget_says(self, photo: Photo, workers: int) -> None:
        made, lock, most = tiny(), threading.Lock(), [0, 0]
        entry = 3 * 400 * 600

        class Counted(DevicePixels):
            def prepare(self, reads: Any) -> Any:
                with lock:
                    most[0] += len(reads) * entry
                    most[1] = max(most)
                return super().prepare(reads)

            def finish(self, found: Any) -> Any:
                with lock:
                    most[0] -= len(found) * entry
                return super().finish(found)

        counted = Counted(made, CODEC, log_event=lambda event, **details: None, budget=4 * entry)
        items = copies(photo, 20)
        request = Request(layers=["inner.4"])
        found = within(
            60,
            lambda: list(compute_items(made, request, items, pixels=counted, workers=workers, batch_size=2)),
        )
        assert found == [item.name for item in items]
        assert most == [0, 4 * entry]

    def test_nothing_of_a_batch_is_kept_on_the_device(self, photo: Photo, classifier: gradcam.Classifier) -> None:
        made = DevicePixels(classifier, CODEC, log_event=lambda event, **details: None, saving=Saving())
        request, result = Request(layers=["layer4"]), []  # type: ignore[var-annotated]
        list(compute_items(classifier, request, copies(photo, 4), pixels=made, keep=result))
        for results in result:
            (explanation,) = results.maps.values()
            assert explanation.heatmaps.numel() == 0
            assert results.picture.shape == (400, 600, 3)
            assert results.picture.strides == (0, 0, 0)  # a size, and no pixels
            assert isinstance(results.results[0].draw(), bytes)

    def test_closing_early_leaves_no_thread(self, photo: Photo) -> None:
        made = tiny()
        stream = gradcam.explain_files(
            [photo("coffee.jpg")] * 1 + [photo(name) for name in NAMES], made, pixels="device"
        )
        next(stream)
        stream.close()
        assert pixel_threads() == []

    def test_an_error_of_finish_comes_out(self, photo: Photo) -> None:
        def raise_(fetched: Any, found: Any) -> Any:
            raise OSError("the disk is full")

        made = tiny()
        pixels = DevicePixels(made, CODEC, log_event=lambda event, **details: None)
        with pytest.raises(OSError, match="the disk is full"):
            list(compute_items(made, Request(layers=["inner.4"]), copies(photo), pixels=pixels, finish=raise_))


def compute_items(
    classifier: gradcam.Classifier,
    request: Request,
    items: Sequence[Item],
    *,
    keep: list[Any] | None = None,
    **options: Any,
) -> Iterator[Any]:
    from functools import partial

    from gradcam.batch.findings import find
    from gradcam.batch.pipeline import compute_items

    def finish(fetched: Any, found: Any) -> str:
        if keep is not None:
            keep.append(found)
        return fetched.item.name

    more: dict[str, Any] = {"batch_size": 2, "workers": 2, "finish": finish} | options
    return compute_items(classifier, partial(find, classifier, request), items, **more)


class TestChoice:
    @pytest.mark.parametrize("place", [None, "cuda"])
    def test_auto_is_the_processor(
        self, classifier: gradcam.Classifier, monkeypatch: pytest.MonkeyPatch, place: str | None
    ) -> None:
        monkeypatch.setattr(device, "find_codec", lambda place: CODEC)
        assert find_pixels("auto", classifier, device=place) is None
        assert find_pixels("cpu", classifier, device=place) is None
        assert find_pixels("device", classifier, device=place) is CODEC

    def test_device_is_the_codec_of_the_device(self, classifier: gradcam.Classifier) -> None:
        assert find_pixels("device", classifier) is CODEC

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"fit": "whole"}, "the fit is 'whole'"),
            ({"reader": lambda path: None}, "the reader is user-defined"),
            ({"preprocess": SimpleNamespace(channels=3)}, "preprocessing is not a plain resize and crop of RGB"),
        ],
    )
    def test_what_cannot_be_on_the_device(self, classifier: gradcam.Classifier, change: Any, reason: str) -> None:
        changed = replace(classifier, **change)
        assert find_pixels("auto", changed) is None
        with pytest.raises(
            DeviceError, match=rf"^Images cannot be processed on the device: .*{reason}.*Use --pixels cpu\.$"
        ):
            find_pixels("device", changed)

    def test_a_device_without_a_codec(self, classifier: gradcam.Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "find_codec", lambda place: None)
        with pytest.raises(DeviceError, match="JPEG cannot be decoded on cpu .this needs CUDA"):
            find_pixels("device", classifier)

    def test_what_is_no_choice(self, classifier: gradcam.Classifier) -> None:
        with pytest.raises(GradcamError, match="pixels is 'gpu', expected one of 'auto', 'cpu', 'device'"):
            gradcam.explain_files("photos/", classifier, pixels="gpu")


class TestLost:
    def test_it_is_told_from_other_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lost, gpu = RuntimeError("CUDA error: unspecified launch failure\nCompile with"), torch.device("cuda:1")
        devices.check_device(torch.device("cpu"), lost)
        monkeypatch.setattr(devices, "_ask", lambda place: None)
        devices.check_device(gpu, lost)  # it answers

        def fail(place: torch.device) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(devices, "_ask", fail)
        devices.check_device(gpu, ValueError("of the model"))
        devices.check_device(gpu, torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(
            DeviceError, match=r"^cuda:1 was lost \(CUDA error: unspecified launch failure\), .*--resume"
        ):
            devices.check_device(gpu, lost)

    @pytest.mark.slow
    @pytest.mark.parametrize("stage", ["model", "decode", "draw"])
    def test_a_run_ends_and_is_gone_on_with(
        self, folder: Path, photo: Photo, gradcam_command: Command, monkeypatch: Any, stage: str
    ) -> None:
        (folder / "photos").mkdir()
        for i, name in enumerate(("coffee.jpg", "chelsea.jpg", "rocket.jpg") * 3):
            shutil.copy(photo(name), folder / "photos" / f"{i}.jpg")
        options = ("batch", "photos", "--device", "cpu", "--pixels", "device", "--batch-size", 2)
        assert gradcam_command(*options, "-o", "whole").status == 0
        calls = [0]

        def lose(place: torch.device, error: BaseException) -> None:
            raise DeviceError("cuda:0 was lost (here): go on with --resume")

        def fail() -> Exception:
            return RuntimeError("CUDA error")

        with monkeypatch.context() as patch:
            patch.setattr(device, "check_device", lose)
            patch.setattr(compute, "check_device", lose)
            codec, _, overlay = failing(stage, fail, most=-1)
            later: Callable[..., Any] = overlay if stage == "draw" else codec.decode
            usual = {
                "decode": CODEC.decode,
                "draw": device.on_device.overlay,
                "model": compute.BatchExplainer._run_part,
            }

            def count(*given: Any, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] < 4:
                    return usual[stage](*given, **options)
                if stage == "model":
                    lose(torch.device("cpu"), fail())
                return later(*given, **options)

            if stage == "decode":
                patch.setattr(device, "find_codec", lambda place: replace(CODEC, decode=count))
            elif stage == "draw":
                patch.setattr(device.on_device, "overlay", count)
            else:
                patch.setattr(compute.BatchExplainer, "_run_part", count)
            outcome = gradcam_command(*options, "-o", "out")
        assert outcome.status == 1
        assert "cuda:0 was lost (here): go on with --resume" in outcome.err
        lines = (folder / "out" / "manifest.jsonl").read_text().splitlines()
        assert len(lines) < 9
        assert all(json.loads(line)["status"] == "ok" for line in lines)  # none is blamed
        assert gradcam_command(*options, "-o", "out", "--resume").status == 0
        for name in ("manifest.jsonl", "run.json", *(f"{i}-gradcam.jpg" for i in range(9))):
            assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()


class TestShell:
    @pytest.fixture
    def photos(self, folder: Path, photo: Photo) -> Path:
        (folder / "photos").mkdir()
        for name in ("coffee.jpg", "chelsea.jpg", "koala.webp"):
            shutil.copy(photo(name), folder / "photos" / name)
        return folder / "photos"

    def test_run_json_says_what_was_used_and_resume_does_not_mix(
        self, folder: Path, photos: Path, gradcam_command: Command
    ) -> None:
        options = ("batch", "photos", "-o", "out", "--device", "cpu")
        assert gradcam_command(*options, "--pixels", "device").status == 0
        settings = json.loads((folder / "out" / "run.json").read_text())["settings"]
        assert settings["pixels"] == {"decoder": CODEC.name, "resizer": "PyTorch", "encoder": CODEC.name}
        outcome = gradcam_command(*options, "--resume")
        assert outcome.status == 2
        assert f"pixels.decoder: {CODEC.name} → nothing" in outcome.err
        assert gradcam_command(*options, "--resume", "--pixels", "device").status == 0

    @pytest.mark.parametrize("options", [("--format", "png"), ("--save", "overlay,heatmap"), ("--report",)])
    def test_the_encoder_is_named(
        self, folder: Path, photos: Path, gradcam_command: Command, options: tuple[str, ...]
    ) -> None:
        outcome = gradcam_command("batch", "photos", "-o", "out", "--device", "cpu", "--pixels", "device", *options)
        assert outcome.status == 0
        assert json.loads((folder / "out" / "run.json").read_text())["settings"]["pixels"]["encoder"] == "OpenCV"

    def test_auto_writes_what_cpu_writes(self, folder: Path, photos: Path, gradcam_command: Command) -> None:
        for name in ("auto", "cpu"):
            assert gradcam_command("batch", "photos", "-o", name, "--device", "cpu", "--pixels", name).status == 0
        assert "pixels" not in json.loads((folder / "auto" / "run.json").read_text())["settings"]
        for name in ("run.json", "manifest.jsonl", "coffee-gradcam.jpg"):
            assert (folder / "auto" / name).read_bytes() == (folder / "cpu" / name).read_bytes()
        picture = pixels(folder / "auto" / "coffee-gradcam.jpg")
        assert picture.shape == (400, 600, 3)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--fit", "whole"), "Images cannot be processed on the device: this needs the fit 'crop'"),
            (("--pages",), "Images cannot be processed on the device: pages are made on the CPU"),
            (("--engine", "ray"), "--pixels device does not work with --engine ray"),
        ],
    )
    def test_what_cannot_be_is_said_before_all_work(
        self, folder: Path, photos: Path, gradcam_command: Command, options: tuple[str, ...], said: str
    ) -> None:
        outcome = gradcam_command("batch", "photos", "-o", "out", "--device", "cpu", "--pixels", "device", *options)
        assert outcome.status != 0
        assert said in outcome.err
        assert not (folder / "out").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_without_a_gpu_the_device_has_to_be_named(
        self, folder: Path, photos: Path, gradcam_command: Command
    ) -> None:
        outcome = gradcam_command("batch", "photos", "-o", "out", "--pixels", "device")
        assert outcome.status != 0
        assert "--pixels device needs a GPU, but no GPU was found" in outcome.err


def test_pictures_without_a_file_are_prepared_as_always() -> None:
    made = tiny()
    picture = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    pair = [
        list(gradcam.explain_files([picture, picture], made, layers=["inner.4"], pixels=item))
        for item in ("device", "cpu")
    ]
    for ours, theirs in zip(*pair):
        one, other = (next(iter(item.explanations.values())) for item in (ours, theirs))
        assert torch.equal(one.heatmaps, other.heatmaps)


def test_formats_that_the_processor_decodes_are_resized_on_the_device() -> None:
    made = tiny()
    seen: list[str] = []
    pixels = DevicePixels(made, CODEC, log_event=lambda event, **details: seen.append(event))
    names = list(compute_items(made, Request(layers=["inner.4"]), noises(5), pixels=pixels))
    assert names == [f"folder/{i:03}.png" for i in range(5)]
    assert set(seen) <= {"batch"}
