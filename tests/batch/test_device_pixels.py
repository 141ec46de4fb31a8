"""Test images on the device, with the CPU standing in for it: equal results, bad images, and a failing device."""

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
from gradcam.batch.device import DevicePixels, MemoryGate, find_device_codec
from gradcam.batch.engine import BatchWork, explain_locally
from gradcam.batch.image_results import ExplainRequest
from gradcam.batch.result_names import OutputOptions
from gradcam.batch.save import Saver
from gradcam.errors import DeviceError, GradcamError
from gradcam.images.jpeg import Codec, find_codec
from gradcam.models import device as devices
from gradcam.sources.contents import InputImage
from gradcam.storage.records import ImageOutcome
from tests.batch.test_pipeline import (
    Content,
    _leaves_no_trace,
    explain_items,
    name_after,
    noises,
    pixel_threads,
    tiny,
    within,
)
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
    """Return files of every kind that the device cannot decode, among those that it can."""
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


def items_of(contents: dict[str, bytes]) -> list[InputImage]:
    return [InputImage(name, Content(data)) for name, data in contents.items()]


def photographs(photo: Photo) -> list[InputImage]:
    return [InputImage(name, Content(path=photo(name))) for name in NAMES]


def explain(
    classifier: gradcam.Classifier,
    items: Any,
    pixels: str = "device",
    batch_size: int = 4,
    events: Any = None,
    **saving: Any,
) -> list[ImageOutcome]:
    """Return the reports, which include the files."""
    work = BatchWork(classifier, ExplainRequest(layers=[classifier.layer]), items, batch_size, workers=2, pixels=pixels)
    stems = {item.name: item.name for item in items}
    saver = Saver(None, stems, OutputOptions(**saving), classifier, work.request)

    events = [] if events is None else events
    log_event = lambda event, **details: events.append((event, details))  # noqa: E731
    return list(explain_locally(work, saver, is_needed=lambda item: True, log_event=log_event))


def overlays(report: ImageOutcome) -> list[np.ndarray]:
    return [np.array(Image.open(BytesIO(data)).convert("RGB")).astype(int) for data in report.files.values()]


def assert_alike(
    ours: Sequence[ImageOutcome], theirs: Sequence[ImageOutcome], *, codec: float = 1.0, probability: float = 0.005
) -> None:
    """Compare reports; `codec` is the largest mean difference between the pixels of two encoders.

    Overlays are not compared if the probabilities of the two top classes differ by less than `probability` allows.
    """
    assert len(ours) == len(theirs)
    for report, reference in zip(ours, theirs):
        assert (report.record.image, report.record.error) == (reference.record.image, reference.record.error)
        assert (report.record.size, report.record.region) == (reference.record.size, reference.record.region)
        assert list(report.files) == list(reference.files)
        if report.record.error is None:
            first, second = report.record.explained[0], reference.record.explained[0]
            top, next_ = (prediction.probability for prediction in reference.record.predictions[:2])
            if first.index != second.index and top - next_ <= 2 * probability:
                continue
            assert (first.index, first.blank, first.overlay) == (second.index, second.blank, second.overlay)
            for prediction, expected in zip(report.record.predictions, reference.record.predictions):
                assert abs(prediction.probability - expected.probability) <= probability
            for overlay, expected_overlay in zip(overlays(report), overlays(reference)):
                assert abs(overlay - expected_overlay).mean() <= codec


def load(device: str) -> gradcam.Classifier:
    return gradcam.load_classifier(device=device)


class TestEquality:
    @pytest.mark.parametrize("device", DEVICES)
    def test_classes_probabilities_and_overlays_equal_those_of_the_cpu(self, photo: Photo, device: str) -> None:
        items = photographs(photo)
        theirs = explain(load("cpu"), items, pixels="cpu", format="png")
        ours = explain(load(device), items, format="png")
        assert all(report.record.error is None for report in ours)
        # The photographs store chroma at half the resolution: nvJPEG repeats the values, libjpeg interpolates them.
        assert_alike(ours, theirs, **({"codec": 0.2} if device == "cpu" else NVJPEG))
        # On the CPU, decoded pixels are equal and PNG is lossless, but the maps differ by the rounding of inputs. A
        # difference of one level changes a colour by up to 3.
        for report, reference in zip(ours, theirs) if device == "cpu" else ():
            for overlay, expected in zip(overlays(report), overlays(reference)):
                assert (abs(overlay - expected) > 3).mean() <= 1e-3

    @pytest.mark.parametrize("device", DEVICES)
    def test_jpeg_is_encoded_on_the_device(self, photo: Photo, device: str) -> None:
        items = photographs(photo)
        theirs = explain(load("cpu"), items, pixels="cpu", quality=95)
        assert_alike(explain(load(device), items, quality=95), theirs, **({"codec": 2} if device == "cpu" else NVJPEG))

    @pytest.mark.parametrize("device", DEVICES)
    def test_files_of_full_chroma_resolution_are_decoded_alike(self, photo: Photo, device: str) -> None:
        items = items_of({name: jpeg(Image.open(photo(name)).convert("RGB"), subsampling=0) for name in NAMES})
        theirs = explain(load("cpu"), items, pixels="cpu", format="png")
        assert_alike(explain(load(device), items, format="png"), theirs, codec=0.7)

    def test_pictures_from_python(self, photo: Photo, classifier: gradcam.Classifier) -> None:
        paths = [photo(name) for name in NAMES]
        pair = [gradcam.explain_files(paths, classifier, pixels=pixels, batch_size=3) for pixels in ("device", "cpu")]
        for ours, theirs in zip(*pair):
            explanation, expected = (next(iter(item.explanations.values())) for item in (ours, theirs))
            assert isinstance(explanation.images[0], np.ndarray)
            assert np.array_equal(explanation.images[0], expected.images[0])
            assert explanation.heatmaps.device.type == "cpu"
            assert torch.equal(explanation.classes, expected.classes)
            assert (explanation.probabilities() - expected.probabilities()).abs().max() <= 0.005
            assert explanation.overlay().shape == expected.overlay().shape

    @pytest.mark.parametrize("kinds", [("heatmap",), ("panel",), ("overlay", "heatmap", "map", "panel")])
    def test_outputs_that_the_device_cannot_draw_are_drawn_on_the_cpu(self, photo: Photo, kinds: Any) -> None:
        items = photographs(photo)[:2]
        runs = [explain(load("cpu"), items, pixels=pixels, kinds=kinds) for pixels in ("device", "cpu")]
        for ours, theirs in zip(*runs):
            assert list(ours.files) == list(theirs.files)
            assert ours.record.explained[0].panel == theirs.record.explained[0].panel

    def test_results_do_not_depend_on_which_images_remain(self, photo: Photo, classifier: gradcam.Classifier) -> None:
        full = {report.record.image: report for report in explain(classifier, photographs(photo))}
        request, items = ExplainRequest(layers=["layer4"]), photographs(photo)
        work = BatchWork(classifier, request, items, batch_size=4, workers=3, pixels="device")
        saver = Saver(None, {name: name for name in NAMES}, OutputOptions(), classifier, request)
        for report in explain_locally(work, saver, lambda item: item.name in NAMES[1::2], device.drop_event):
            assert report.record == full[report.record.image].record
            assert report.files == full[report.record.image].files


@pytest.mark.parametrize("device", DEVICES)
def test_bad_pictures_in_the_middle_of_a_batch(photo: Photo, device: str) -> None:
    items = items_of(bad_pictures(photo))
    theirs = explain(load("cpu"), items, pixels="cpu", batch_size=8)
    ours = explain(load(device), items, batch_size=8)
    failed = [report.record.image for report in ours if report.record.error]
    # Some builds of Pillow cannot decode arithmetic coding.
    unreadable = [name for name in failed if "arithmetic" not in name]
    assert unreadable == ["05-cut.jpg", "10-empty.jpg", "11-text.jpg"]
    if device == "cuda":  # Each decoder returns different pixels for a damaged file.
        ours, theirs = ([item for item in value if "damaged" not in item.record.image] for value in (ours, theirs))
    assert_alike(ours, theirs, **({"codec": 2} if device == "cpu" else NVJPEG))


def failing(
    stage: str, error: Callable[[], Exception], max_images: int
) -> tuple[Codec, Callable[..., Any], Callable[..., Any]]:
    """Return codec, `resize` and `overlay`; the one for `stage` fails with more than `max_images` images."""

    def guard(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(pictures: Any, *args: Any, **options: Any) -> Any:
            if name == stage and len(pictures) > max_images:
                raise error()
            return work(pictures, *args, **options)

        return guarded

    codec = replace(CODEC, decode=guard("decode", CODEC.decode), encode=guard("encode", CODEC.encode))
    return codec, guard("resize", device.on_device.resize), guard("draw", device.on_device.overlay)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def break_(stage: str, error: Callable[[], Exception], max_images: int) -> None:
        codec, resize, overlay = failing(stage, error, max_images)
        monkeypatch.setattr(device, "find_codec", lambda place: codec)
        monkeypatch.setattr(device.on_device, "resize", resize)
        monkeypatch.setattr(device.on_device, "overlay", overlay)

    return break_


def copies(photo: Photo, count: int = 8) -> list[InputImage]:
    return [InputImage(f"{i}.jpg", Content(photo("coffee.jpg").read_bytes())) for i in range(count)]


OUT_OF_MEMORY_ERRORS: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory"),
    lambda: RuntimeError("CUDA error: out of memory"),
]


@pytest.mark.parametrize("stage", ["decode", "resize", "draw", "encode"])
class TestNoRoom:
    @pytest.mark.slow
    @pytest.mark.parametrize("error", OUT_OF_MEMORY_ERRORS)
    def test_the_batch_of_a_stage_is_halved_and_logged(
        self, photo: Photo, breaking: Any, stage: str, error: Any
    ) -> None:
        expected = explain(tiny(), copies(photo), batch_size=8)
        breaking(stage, error, max_images=3)
        events: Events = []
        explanation = explain(tiny(), copies(photo), batch_size=8, events=events)
        halved = [details for event, details in events if event == "out of memory"]
        assert halved == [{"stage": stage, "pictures": size, "from_now_on": size // 2} for size in (8, 4)]
        assert [report.record for report in explanation] == [report.record for report in expected]
        assert [report.files for report in explanation] == [report.files for report in expected]

    def test_images_that_do_not_fit_alone_are_processed_on_the_cpu(
        self, photo: Photo, breaking: Any, stage: str
    ) -> None:
        expected = explain(tiny(), copies(photo, 3), pixels="cpu", batch_size=3)
        breaking(stage, OUT_OF_MEMORY_ERRORS[0], max_images=0)
        events: Events = []
        assert_alike(explain(tiny(), copies(photo, 3), batch_size=3, events=events), expected)
        moved = [details for event, details in events if event == "moved to the CPU"]
        assert moved == [{"stage": stage, "why": "out of memory"}] * 3

    def test_images_that_the_device_refuses_are_processed_on_the_cpu(
        self, photo: Photo, breaking: Any, stage: str
    ) -> None:
        expected = explain(tiny(), copies(photo, 5), pixels="cpu", batch_size=5)
        breaking(stage, lambda: RuntimeError("Failed to decode batch: 3"), max_images=1)
        events: Events = []
        assert_alike(explain(tiny(), copies(photo, 5), batch_size=5, events=events), expected)
        assert [event for event, _ in events if event != "batch"] == []  # no image was refused on its own


def test_one_that_is_refused_in_the_middle(photo: Photo, classifier: gradcam.Classifier, monkeypatch: Any) -> None:
    def refuse(files: Sequence[Tensor], is_grey: bool) -> list[Tensor]:
        if len({len(file) for file in files} & {len(photo("chelsea.jpg").read_bytes())}):
            raise RuntimeError("Error while decoding JPEG images: nvjpeg 4")
        return CODEC.decode(files, is_grey)

    expected = explain(classifier, photographs(photo), batch_size=7)
    monkeypatch.setattr(device, "find_codec", lambda place: replace(CODEC, decode=refuse))
    events: Events = []
    explanation = explain(classifier, photographs(photo), batch_size=7, events=events)
    assert_alike(explanation, expected)
    assert [details for event, details in events if event != "batch"] == [{"stage": "decode", "why": "refused"}]


def test_a_stream_runs_nothing_else_while_its_codec_runs(photo: Photo, monkeypatch: Any) -> None:
    """The codec writes from its own stream to memory that was free at the call, so no other thread may use it."""
    inside: Counter[str] = Counter()
    overlaps: set[str] = set()

    def watch(stream: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            inside[stream] += 1
            time.sleep(0.02)
            if inside[stream] > 1:
                overlaps.add(stream)
            result = work(*args, **options)
            inside[stream] -= 1
            return result

        return watched

    codec = replace(CODEC, decode=watch("prepare", CODEC.decode), encode=watch("draw", CODEC.encode))
    monkeypatch.setattr(device, "find_codec", lambda place: codec)
    monkeypatch.setattr(device.on_device, "resize", watch("prepare", device.on_device.resize))
    monkeypatch.setattr(device.on_device, "overlay", watch("draw", device.on_device.overlay))
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
        assert started == [0, 1, 2, 3]  # an entry that is larger than the budget runs alone
        gate.leave(500)
        assert started == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("workers", [1, 4])
    def test_pixels_in_flight_stay_within_the_budget(self, photo: Photo, monkeypatch: Any, workers: int) -> None:
        classifier, lock, held_bytes = tiny(), threading.Lock(), [0, 0]
        image_bytes = 3 * 400 * 600

        class Counted(DevicePixels):
            def prepare(self, reads: Any) -> Any:
                with lock:
                    held_bytes[0] += len(reads) * image_bytes
                    held_bytes[1] = max(held_bytes)
                return super().prepare(reads)

            def finish(self, findings: Any) -> Any:
                with lock:
                    held_bytes[0] -= len(findings) * image_bytes
                return super().finish(findings)

        monkeypatch.setattr(device, "CPU_BUDGET_BYTES", 4 * image_bytes)
        counted = Counted(classifier, CODEC)
        items, request = copies(photo, 20), ExplainRequest(layers=["inner.4"])
        names = within(60, lambda: list(compute_items(classifier, request, items, pixels=counted, workers=workers)))
        assert names == [item.name for item in items]
        assert held_bytes == [0, 4 * image_bytes]

    def test_no_tensor_of_a_batch_stays_on_the_device(self, photo: Photo, classifier: gradcam.Classifier) -> None:
        pixels = DevicePixels(classifier, CODEC, saving=OutputOptions())
        request, image_results = ExplainRequest(layers=["layer4"]), []  # type: ignore[var-annotated]
        keep = lambda fetched, result: image_results.append(result)  # noqa: E731
        list(compute_items(classifier, request, copies(photo, 4), pixels=pixels, finish=keep))
        assert len(image_results) == 4
        for image_result in image_results:
            (explanation,) = image_result.maps.values()
            assert explanation.heatmaps.numel() == 0
            assert image_result.picture.shape == (400, 600, 3)
            assert image_result.picture.strides == (0, 0, 0)  # strides of zero: the size without pixels
            assert isinstance(image_result.results[0].draw(), bytes)

    def test_closing_early_leaves_no_thread(self, photo: Photo) -> None:
        stream = gradcam.explain_files([photo(name) for name in ("coffee.jpg", *NAMES)], tiny(), pixels="device")
        next(stream)
        stream.close()
        assert pixel_threads() == []

    def test_an_error_of_finish_is_raised(self, photo: Photo) -> None:
        def raise_(fetched: Any, result: Any) -> Any:
            raise OSError("the disk is full")

        classifier, request = tiny(), ExplainRequest(layers=["inner.4"])
        pixels = DevicePixels(classifier, CODEC)
        with pytest.raises(OSError, match="the disk is full"):
            list(compute_items(classifier, request, copies(photo), pixels=pixels, finish=raise_))


def compute_items(classifier: gradcam.Classifier, request: ExplainRequest, items: Any, **options: Any) -> Iterator[Any]:
    return explain_items(
        classifier,
        request,
        items,
        **{"batch_size": 2, "workers": 2, "finish": name_after(0)} | options,
    )


class TestChoice:
    @pytest.mark.parametrize("place", [None, "cuda"])
    def test_auto_is_the_processor(self, classifier: gradcam.Classifier, monkeypatch: Any, place: str | None) -> None:
        monkeypatch.setattr(device, "find_codec", lambda place: CODEC)
        assert find_device_codec("auto", classifier, device=place) is None
        assert find_device_codec("cpu", classifier, device=place) is None
        assert find_device_codec("device", classifier, device=place) is CODEC

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"fit": "whole"}, "the fit is 'whole'"),
            ({"reader": lambda path: None}, r"a custom function \(--reader\)"),
            ({"preprocess": SimpleNamespace(channels=3)}, "preprocessing is not a plain resize and crop of RGB"),
        ],
    )
    def test_unsupported_settings_for_the_device(self, classifier: Any, change: Any, reason: str) -> None:
        changed = replace(classifier, **change)
        assert find_device_codec("auto", changed) is None
        message = rf"^Images cannot be processed on the device: .*{reason}.*Use --pixels cpu\.$"
        with pytest.raises(DeviceError, match=message):
            find_device_codec("device", changed)

    def test_a_device_without_a_codec(self, classifier: gradcam.Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "find_codec", lambda place: None)
        with pytest.raises(DeviceError, match="JPEG cannot be decoded on cpu .this needs CUDA"):
            find_device_codec("device", classifier)

    def test_an_unknown_choice_is_rejected(self, classifier: gradcam.Classifier) -> None:
        with pytest.raises(GradcamError, match="pixels is 'gpu', expected one of 'auto', 'cpu', 'device'"):
            gradcam.explain_files("photos/", classifier, pixels="gpu")


class TestLost:
    def test_a_lost_device_is_distinguished_from_other_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lost, gpu = RuntimeError("CUDA error: unspecified launch failure\nCompile with"), torch.device("cuda:1")
        devices.check_device(torch.device("cpu"), lost)
        monkeypatch.setattr(devices, "_run_on", lambda place: None)
        devices.check_device(gpu, lost)  # The device still answers.

        def fail(place: torch.device) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(devices, "_run_on", fail)
        devices.check_device(gpu, ValueError("of the model"))
        devices.check_device(gpu, torch.OutOfMemoryError("CUDA out of memory"))
        message = r"^cuda:1 was lost \(CUDA error: unspecified launch failure\), .*--resume"
        with pytest.raises(DeviceError, match=message):
            devices.check_device(gpu, lost)

    @pytest.mark.slow
    @pytest.mark.parametrize("stage", ["model", "decode", "draw"])
    def test_a_run_ends_and_is_resumed(
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
            codec, _, overlay = failing(stage, fail, max_images=-1)
            failing_function: Callable[..., Any] = overlay if stage == "draw" else codec.decode
            functions = {"decode": CODEC.decode, "draw": device.on_device.overlay}
            functions["model"] = compute.BatchExplainer._run_part

            def count(*args: Any, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] < 4:
                    return functions[stage](*args, **options)
                if stage == "model":
                    lose(torch.device("cpu"), fail())
                return failing_function(*args, **options)

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
        assert all(json.loads(line)["status"] == "ok" for line in lines)  # No image is recorded as failed.
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

    def test_run_json_records_the_choice_and_resume_requires_it(
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
    def test_the_encoder_is_named(self, folder: Path, photos: Path, gradcam_command: Command, options: Any) -> None:
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
        ("options", "message"),
        [
            (("--fit", "whole"), "Images cannot be processed on the device: this needs the fit 'crop'"),
            (("--pages",), "Images cannot be processed on the device: pages are made on the CPU"),
            (("--engine", "ray"), "--pixels device does not work with --engine ray"),
        ],
    )
    def test_unsupported_options_are_refused_before_the_run(
        self, folder: Path, photos: Path, gradcam_command: Command, options: tuple[str, ...], message: str
    ) -> None:
        outcome = gradcam_command("batch", "photos", "-o", "out", "--device", "cpu", "--pixels", "device", *options)
        assert outcome.status != 0
        assert message in outcome.err
        assert not (folder / "out").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_without_a_gpu_the_device_has_to_be_named(
        self, folder: Path, photos: Path, gradcam_command: Command
    ) -> None:
        outcome = gradcam_command("batch", "photos", "-o", "out", "--pixels", "device")
        assert outcome.status != 0
        assert "--pixels device needs a GPU, but no GPU was found" in outcome.err


def test_arrays_are_prepared_on_the_cpu() -> None:
    classifier = tiny()
    picture = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    pair = [gradcam.explain_files([picture, picture], classifier, pixels=pixels) for pixels in ("device", "cpu")]
    for ours, theirs in zip(*pair, strict=True):
        explanation, expected = (next(iter(item.explanations.values())) for item in (ours, theirs))
        assert torch.equal(explanation.heatmaps, expected.heatmaps)


def test_images_decoded_on_the_cpu_are_resized_on_the_device() -> None:
    classifier, events = tiny(), list[str]()
    pixels = DevicePixels(classifier, CODEC, log_event=lambda event, **details: events.append(event))
    names = list(compute_items(classifier, ExplainRequest(layers=["inner.4"]), noises(5), pixels=pixels))
    assert names == [f"folder/{i:03}.png" for i in range(5)]
    assert set(events) <= {"batch"}
