from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import gradcam
from gradcam.batch import compute as computing
from gradcam.batch import pipeline
from gradcam.batch.engine import BatchWork, explain_to_run
from gradcam.batch.explain_files import FileResult, explain_files
from gradcam.batch.image_results import ExplainedImage, ExplainRequest, explain_batch
from gradcam.batch.pipeline import compute_items
from gradcam.batch.pool import LATER, URGENT, Pool, choose_batch_size, cut_batches
from gradcam.batch.read_items import HashedItem
from gradcam.cam.methods.table import find_methods
from gradcam.errors import GradcamError, ImageError, InputError, LayerError, ModelError, TargetError
from gradcam.hooks.memory import is_out_of_memory
from gradcam.sources.contents import InputImage
from gradcam.storage.records import Record
from gradcam.targets import ClassTarget
from tests.helpers import tiny_model

NAMES = (
    "cat_and_espresso.jpg", "koala.webp", "camera.png", "chelsea.jpg", "lemur.webp",
    "panda.webp", "macaw.webp", "coffee.jpg", "rocket.jpg", "astronaut.jpg",
)  # fmt: skip
PIXELS = ExplainRequest(layers=["4"])  # a layer of the tiny model


@dataclass
class Content:
    """The bytes of an archive member, or a file; counts how often they were read."""

    data: bytes = b""
    path: Path | None = None
    reads: list[None] = field(default_factory=list)

    def read(self) -> bytes:
        self.reads.append(None)
        return self.data if self.path is None else self.path.read_bytes()


def reads(item: InputImage) -> int:
    assert isinstance(item.content, Content)
    return len(item.content.reads)


def files(folder: Path, names: Iterable[str] = NAMES) -> list[InputImage]:
    return [InputImage(name, Content(path=folder / name)) for name in names]


def noise(seed: int, height: int = 24, width: int = 20) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def noises(count: int) -> list[InputImage]:
    return [InputImage(f"folder/{i:03}.png", Content(noise(i))) for i in range(count)]


def keep(fetched: HashedItem, result: Any) -> tuple[HashedItem, Any]:
    return fetched, result


def explain_items(classifier: Any, request: ExplainRequest, items: Iterable[InputImage], **options: Any) -> Any:
    return compute_items(classifier, partial(explain_batch, classifier, request), items, **options)


def name(fetched: HashedItem, result: Any) -> str:
    return fetched.item.name


def name_after(seconds: float) -> Callable[..., str]:
    """Return a function that waits before it returns the name of the image."""
    return lambda fetched, result: time.sleep(seconds) or fetched.item.name


def white() -> InputImage:
    file = BytesIO()
    Image.new("RGB", (20, 24), "white").save(file, "png")
    return InputImage("white.png", Content(file.getvalue()))


def run(
    classifier: gradcam.Classifier, items: Iterable[InputImage], request: ExplainRequest = PIXELS, **options: Any
) -> list[ExplainedImage | GradcamError]:
    settings: dict[str, Any] = {"batch_size": 4, "workers": 2} | options
    return [result for _, result in explain_items(classifier, request, items, finish=keep, **settings)]


def map_of(result: ExplainedImage | GradcamError) -> Any:
    assert isinstance(result, ExplainedImage), result
    (explanation,) = result.maps.values()
    return explanation


def assert_equal(result: ExplainedImage | GradcamError, expected: ExplainedImage | GradcamError) -> None:
    ours, theirs = map_of(result), map_of(expected)
    for part in ("maps", "heatmaps", "classes", "scores", "output"):
        assert torch.equal(getattr(ours, part), getattr(theirs, part)), part
    assert isinstance(result, ExplainedImage)
    assert isinstance(expected, ExplainedImage)
    assert result.predictions == expected.predictions
    assert np.array_equal(result.picture, expected.picture)


def pixel_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gradcam-pixels")]


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    threads, opencv = torch.get_num_threads(), cv2.getNumThreads()
    yield
    assert pixel_threads() == []
    assert (torch.get_num_threads(), cv2.getNumThreads()) == (threads, opencv)


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of the function; fail if it takes longer, because a deadlock would take forever."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "waits for ever"
    return results[0]


class Spy(nn.Module):
    """The tiny model with a listener that is called before each run."""

    def __init__(self, listen: Callable[[Tensor], None] = lambda images: None) -> None:
        super().__init__()
        self.inner = tiny_model().eval()
        self.listen = listen

    def forward(self, images: Tensor) -> Tensor:
        self.listen(images)
        return self.inner(images)


def tiny(listen: Callable[[Tensor], None] = lambda images: None, **options: Any) -> gradcam.Classifier:
    """Load a classifier whose model calls the listener from now on."""
    model = Spy()
    classifier = gradcam.load_classifier(model, **{"size": 16, "layer": "inner.4"} | options)
    model.listen = listen
    return classifier


INNER = ExplainRequest(layers=["inner.4"])


class TestValues:
    def test_they_equal_those_of_single_images(self, classifier: gradcam.Classifier, photo: Any) -> None:
        result = run(classifier, files(photo("")), ExplainRequest(layers=[classifier.layer]))
        for item, image in zip(result, NAMES):
            ours, alone = map_of(item), classifier.explain(photo(image))
            assert torch.equal(ours.classes, alone.classes)
            for part in ("maps", "heatmaps", "scores"):
                torch.testing.assert_close(getattr(ours, part), getattr(alone, part), rtol=1e-5, atol=1e-5)
            assert np.array_equal(item.picture, alone.images[0])  # type: ignore[union-attr]
            assert ours.regions == alone.regions
            best = alone.probabilities()[0].argmax().item()
            assert item.predictions[0].index == best  # type: ignore[union-attr]

    def test_they_equal_those_of_the_same_batches(self, classifier: gradcam.Classifier, photo: Any) -> None:
        request = ExplainRequest(layers=[classifier.layer], methods=find_methods(["gradcam", "layercam"]))
        paths = [photo(image) for image in NAMES]
        batches = [[classifier.prepare(path) for path in paths[start : start + 4]] for start in range(0, 10, 4)]
        expected = [item for batch in batches for item in explain_batch(classifier, request, batch)]
        results = run(classifier, files(photo("")), request, workers=3)
        assert len(results) == len(expected)
        for result, reference in zip(results, expected):
            assert isinstance(result, ExplainedImage)
            assert isinstance(reference, ExplainedImage)
            assert result.maps.keys() == reference.maps.keys()
            for key in result.maps:
                assert torch.equal(result.maps[key].maps, reference.maps[key].maps)
                assert torch.equal(result.maps[key].heatmaps, reference.maps[key].heatmaps)
            assert result.predictions == reference.predictions

    def test_a_second_run_of_some_images_gives_identical_results(self, classifier: Any, photo: Any) -> None:
        request = ExplainRequest(layers=[classifier.layer])
        results = run(classifier, files(photo("")), request)
        items = files(photo(""))
        remaining = run(classifier, items, request, is_needed=lambda item: item.name in (NAMES[1], NAMES[8]))
        assert len(remaining) == 2
        assert_equal(remaining[0], results[1])
        assert_equal(remaining[1], results[8])
        # The second batch has no needed image, so it is skipped.
        assert [reads(item) for item in items] == [1] * 4 + [0] * 4 + [1] * 2

    def test_they_do_not_depend_on_how_many_threads_read(self) -> None:
        classifier = gradcam.load_classifier(tiny_model().eval(), size=16)
        one_worker, five_workers = (run(classifier, noises(30), workers=workers) for workers in (1, 5))
        assert len(one_worker) == 30
        for ours, theirs in zip(one_worker, five_workers):
            assert_equal(ours, theirs)

    def test_pictures_of_several_sizes_once_preprocessed(self) -> None:
        class AsItIs:
            def __call__(self, image: Any) -> Tensor:
                return torch.from_numpy(image).permute(2, 0, 1).float() / 255

            def region(self, height: int, width: int) -> tuple[int, int, int, int]:
                return 0, 0, height, width

        batches: list[tuple[int, ...]] = []  # When a model is first used, each image is also run alone.
        classifier = replace(tiny(lambda images: batches.append(tuple(images.shape))), preprocess=AsItIs())
        sizes = [(16, 20), (18, 12), (16, 20), (18, 12), (16, 20)]
        items = [InputImage(f"{i}.png", Content(noise(i, *size))) for i, size in enumerate(sizes)]
        results = run(classifier, items, INNER, batch_size=5)
        assert [shape for shape in batches if shape[0] > 1] == [(3, 3, 16, 20), (2, 3, 18, 12)]
        for i, (item, size) in enumerate(zip(results, sizes)):
            assert map_of(item).heatmaps.shape == (1, 1, *size)
            pixels = np.array(Image.open(BytesIO(noise(i, *size))))
            torch.testing.assert_close(map_of(item).maps, classifier.explain(pixels).maps, rtol=1e-5, atol=1e-6)


class TestClassesOfItems:
    def test_some_pictures_have_a_class_of_their_own(self, classifier: gradcam.Classifier, photo: Any) -> None:
        classes = {NAMES[0]: "espresso", NAMES[2]: "7", NAMES[3]: "tiger cat"}
        items = [replace(item, wanted=classes.get(item.name)) for item in files(photo(""), NAMES[:5])]
        request = ExplainRequest(layers=[classifier.layer], target=ClassTarget(top=2))
        results = run(classifier, items, request, batch_size=5)
        top = [classifier.explain(photo(name)).probabilities()[0].topk(2).indices.tolist() for name in NAMES]
        assert [map_of(item).classes.tolist()[0] for item in results] == [[967], top[1], [7], [282], top[4]]
        alone = classifier.explain(photo(NAMES[0]), target="espresso")
        torch.testing.assert_close(map_of(results[0]).heatmaps, alone.heatmaps, rtol=1e-5, atol=1e-5)

    def test_images_with_a_class_are_explained_together(self) -> None:
        sizes: list[int] = []
        items = [replace(item, wanted=class_name) for item, class_name in zip(noises(5), ("1", None, "3", None, "1"))]
        results = run(tiny(lambda images: sizes.append(len(images))), items, INNER, batch_size=5)
        # When a model is first used, each image is also run alone.
        assert [size for size in sizes if size > 1] == [3, 2]
        assert [map_of(results[i]).classes.item() for i in (0, 2, 4)] == [1, 3, 1]

    def test_an_unknown_class_fails_only_its_image(self, classifier: gradcam.Classifier, photo: Any) -> None:
        first, second = files(photo(""), NAMES[:2])
        result = run(classifier, [replace(first, wanted="espreso"), second], ExplainRequest(layers=[classifier.layer]))
        assert str(result[0]).startswith(f"{NAMES[0]}: No class is called 'espreso'; nearest: 'espresso'")
        assert isinstance(result[1], ExplainedImage)


class TestBrokenPictures:
    def test_one_in_the_middle_drops_out_of_its_batch(self, classifier: gradcam.Classifier, photo: Any) -> None:
        items = files(photo(""), NAMES[:6])
        items[1] = InputImage("cut/off.jpg", Content(photo("chelsea.jpg").read_bytes()[:9000]))
        request = ExplainRequest(layers=[classifier.layer])
        results = run(classifier, items, request)
        assert isinstance(results[1], ImageError)
        assert str(results[1]).startswith("cut/off.jpg: is damaged or cut off")
        assert str(results[1]).count("off.jpg") == 1
        remaining = explain_batch(classifier, request, [classifier.prepare(photo(NAMES[i])) for i in (0, 2, 3)])
        for i, expected in zip((0, 2, 3), remaining):
            assert_equal(results[i], expected)

    def test_all_of_a_batch(self) -> None:
        items = noises(12)
        items[4:8] = [InputImage(f"{i}.png", Content(b"")) for i in range(4)]
        result = run(gradcam.load_classifier(tiny_model().eval(), size=16), items)
        assert [str(item) for item in result[4:8]] == [f"{i}.png: is empty" for i in range(4)]
        assert all(isinstance(item, ExplainedImage) for item in result[:4] + result[8:])

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (ImageError("is gone"), "a b.png: is gone"),
            (ImageError("a b.png: is gone"), "a b.png: is gone"),
            (MemoryError(), "a b.png: does not fit into memory"),
            (KeyError("no\nsuch"), "a b.png: KeyError: 'no\\nsuch' (for the traceback, set GRADCAM_TRACEBACK=1)"),
            (SystemExit(3), "a b.png: SystemExit: 3 (for the traceback, set GRADCAM_TRACEBACK=1)"),
        ],
    )
    def test_an_error_of_reading_is_one_line_for_its_image(self, error: BaseException, line: str) -> None:
        class Broken(Content):
            def read(self) -> bytes:
                raise error

        results = run(tiny(), [*noises(1), InputImage("a b.png", Broken()), *noises(1)], INNER)
        assert str(results[1]) == line
        assert isinstance(results[1], GradcamError)
        # Frames of a traceback would keep pixels alive.
        assert results[1].__traceback__ is results[1].__cause__ is results[1].__context__ is None
        assert_equal(results[0], results[2])

    @pytest.mark.parametrize("error", [ValueError("on\npurpose"), SystemExit("on purpose")])
    def test_a_model_that_fails_on_one_picture(self, error: BaseException) -> None:
        sizes: list[int] = []

        def listen(images: Tensor) -> None:
            sizes.append(len(images))
            if (images.mean((1, 2, 3)) > 1.5).any():  # the white image
                raise error

        items = noises(4)
        items[2] = white()
        result = run(tiny(listen), items, INNER)
        kind = type(error).__name__
        assert str(result[2]) == f"white.png: {kind}: on purpose (for the traceback, set GRADCAM_TRACEBACK=1)"
        assert sizes == [4, 1, 1, 1, 1]
        for i in (0, 1, 3):
            assert_equal(result[i], run(tiny(), [items[i]], INNER)[0])

    def test_scores_and_probabilities_that_are_nan_name_their_picture(self) -> None:
        classifier = tiny()
        with torch.no_grad():
            classifier.model.inner[8].bias[0] = float("nan")  # type: ignore[union-attr, operator, index]
        (error,) = run(classifier, noises(1), replace(INNER, target=ClassTarget([[1]])))
        assert str(error).startswith("folder/000.png: The model's output contains NaN or infinite values")
        with torch.no_grad():
            classifier.model.inner[8].bias.fill_(float("nan"))  # type: ignore[union-attr, operator, index]
        (error,) = run(classifier, noises(1), INNER)
        assert str(error).startswith("folder/000.png: The scores are NaN at some positions: check")

    def test_a_traceback_on_request(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("GRADCAM_TRACEBACK", "1")
        run(tiny(), [InputImage("broken.png", Content(b"nothing"))], INNER)
        assert "Traceback (most recent call last)" in capsys.readouterr().err


class TestReaders:
    """Test user-defined readers, which read from files."""

    def test_a_file_is_read_from_its_path_and_an_archive_member_from_a_temporary_file(self, tmp_path: Path) -> None:
        (tmp_path / "one.png").write_bytes(noise(1))
        paths: dict[str, Path] = {}  # Threads read in any order.

        def reader(path: Path) -> Any:
            paths[path.suffix] = path
            return gradcam.read_image(path)

        items = [InputImage("folder/one.png", Content(path=tmp_path / "one.png"))]
        items.append(InputImage("folder/one.PNG", Content(noise(1))))
        results = run(tiny(reader=reader), items, INNER)
        assert (paths[".png"], reads(items[0])) == (tmp_path / "one.png", 0)
        assert (paths.keys(), paths[".PNG"].parent.exists()) == ({".png", ".PNG"}, False)
        for result, expected in zip(results, run(tiny(), items, INNER)):
            assert_equal(result, expected)

    @pytest.mark.parametrize("in_archive", [True, False])
    @pytest.mark.parametrize("error", [OSError, SystemExit])
    def test_its_errors_name_the_item(self, tmp_path: Path, in_archive: bool, error: type[BaseException]) -> None:
        (tmp_path / "one.png").write_bytes(b"nothing")

        def reader(path: Path) -> Any:
            raise error(f"cannot read {path}")

        content = Content(b"nothing") if in_archive else Content(path=tmp_path / "one.png")
        (result,) = run(tiny(reader=reader), [InputImage("folder/one.png", content)], INNER)
        reason = f"{error.__name__}: cannot read folder/one.png"
        assert str(result) == f"folder/one.png: the reader reader failed ({reason})"

    def test_a_path_relative_to_the_current_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("one.png").write_bytes(b"nothing")
        item = InputImage("folder/one.png", Content(path=Path("one.png")))
        (error,) = run(tiny(reader=gradcam.read_image), [item], INNER)
        assert str(error) == "folder/one.png: is not an image in a supported format"

    def test_a_file_that_is_changed_while_it_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "one.png"
        path.write_bytes(noise(1))

        def reader(path: Path) -> Any:
            image = gradcam.read_image(path)
            with path.open("ab") as file:
                file.write(b"more")
            return image

        (error,) = run(tiny(reader=reader), [InputImage("one.png", Content(path=path))], INNER)
        assert str(error) == "one.png: changed while it was read: try again when the file is complete"

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        item = InputImage("one.png", Content(path=tmp_path / "one.png"))
        (error,) = run(tiny(reader=gradcam.read_image), [item], INNER)
        assert str(error) == "one.png: cannot be opened (No such file or directory)"

    @pytest.mark.parametrize("own_reader", [True, False])
    def test_an_audit_has_the_hash_of_the_data(self, tmp_path: Path, own_reader: bool) -> None:
        (tmp_path / "good.png").write_bytes(noise(1) + bytes(3 * 2**20))  # a file of several chunks
        (tmp_path / "broken.png").write_bytes(b"nothing")
        items = [*files(tmp_path, ("good.png", "broken.png")), InputImage("in_archive.png", Content(noise(2)))]
        items.append(InputImage("gone.png", Content(path=tmp_path / "gone.png")))
        classifier = tiny(reader=gradcam.read_image) if own_reader else tiny()
        pairs = explain_items(classifier, INNER, items, finish=keep, batch_size=4, workers=2, audit=True)
        fetched = [entry for entry, _ in pairs]
        contents = [(tmp_path / "good.png").read_bytes(), b"nothing", noise(2)]
        assert [item.item for item in fetched] == items
        assert [item.sha256 for item in fetched] == [*(hashlib.sha256(data).hexdigest() for data in contents), None]
        ((unasked, _),) = explain_items(classifier, INNER, items[:1], finish=keep, batch_size=4, workers=1)
        assert unasked.sha256 is None


class TestOrder:
    def test_results_come_in_the_order_of_the_items(self) -> None:
        def finish(fetched: HashedItem, result: Any) -> str:
            time.sleep(0.02 * (int(fetched.item.name[-5]) % 3))
            return fetched.item.name

        names = explain_items(tiny(), INNER, noises(20), finish=finish, batch_size=3, workers=4)
        assert list(names) == [item.name for item in noises(20)]

    def test_the_first_result_comes_before_the_last_item_is_requested(self) -> None:
        endless = (InputImage(f"{i}.png", Content(noise(0))) for i in itertools.count())
        stream = explain_items(tiny(), INNER, endless, finish=name, batch_size=2, workers=2)
        assert within(60, lambda: [next(stream) for _ in range(50)]) == [f"{i}.png" for i in range(50)]
        stream.close()

    def test_a_result_does_not_wait_for_the_reading_of_others(self) -> None:
        first_arrived = threading.Event()
        waited: list[bool] = []

        class Slow(Content):
            def read(self) -> bytes:
                waited.append(first_arrived.wait(10))
                return super().read()

        items = noises(4)
        items[1] = InputImage("slow.png", Slow(noise(1)))
        finish = name_after(0.1)  # So the stream is already waiting when this ends.
        for image_name in explain_items(tiny(), INNER, items, finish=finish, batch_size=1, workers=2):
            if image_name == "folder/000.png":
                first_arrived.set()
        assert waited == [True]

    def test_no_items(self) -> None:
        assert run(tiny(), []) == []
        assert run(tiny(), noises(3), is_needed=lambda item: False) == []

    def test_urgent_tasks_come_first(self) -> None:
        result: list[str] = []
        gate = threading.Event()
        with Pool(1) as pool:
            pool.submit(LATER, gate.wait)
            last = [pool.submit(urgency, lambda item=item: result.append(item)) for urgency, item in  # type: ignore[misc]
                    ((LATER, "a"), (LATER, "b"), (URGENT, "c"), (URGENT, "d"))]  # fmt: skip
            gate.set()
            for entry in last:
                entry.result(10)
        assert result == ["c", "d", "a", "b"]


class TestBounds:
    def test_memory_does_not_grow_with_the_number_of_pictures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count the images and the results that are in memory at the same time."""
        lock = threading.Lock()
        alive = {"read": weakref.WeakSet[Any](), "found": weakref.WeakSet[Any]()}
        peak = {"read": 0, "found": 0}
        read_item, submit = pipeline.read_item, Pool.submit

        def count(kind: str, value: Any) -> Any:
            with lock:
                alive[kind].add(value)
                peak[kind] = max(peak[kind], len(alive[kind]))
            return value

        def read(*args: Any, **options: Any) -> Any:
            item = read_item(*args, **options)
            count("read", item.picture)
            return item

        def submit_and_rest(pool: Pool, urgency: int, task: Callable[[], Any], *future: Any) -> Any:
            submitted = submit(pool, urgency, task, *future)
            time.sleep(0.003)  # gives the threads time to continue
            return submitted

        monkeypatch.setattr(pipeline, "read_item", read)
        monkeypatch.setattr(Pool, "submit", submit_and_rest)
        pulled = 0

        def source() -> Iterator[InputImage]:
            nonlocal pulled
            for item in noises(100):
                pulled += 1
                yield item

        classifier, ahead = tiny(), 0

        def explain(*args: Any, **kwargs: Any) -> Any:
            return [count("found", item) for item in explain_batch(classifier, INNER, *args, **kwargs)]

        stream = compute_items(classifier, explain, source(), finish=name_after(0.05), batch_size=4, workers=3)
        for number, _ in enumerate(stream):
            ahead = max(ahead, pulled - number)
            if number in (30, 60):
                time.sleep(0.3)  # a slow consumer
        assert pulled == 100
        late = 3  # Each thread may still hold the item of its last task.
        assert 2 * 4 <= peak["read"] <= 3 * 4 + late  # one batch in the model, and two that were read
        assert 4 < peak["found"] <= 2 * 4 + late
        assert ahead <= 5 * 4

    def test_a_slow_finish(self) -> None:
        finish = name_after(0.05)
        stream = explain_items(tiny(), INNER, noises(30), finish=finish, batch_size=2, workers=1)
        names = within(60, lambda: list(stream))
        assert names == [item.name for item in noises(30)]

    def test_more_threads_than_pictures(self) -> None:
        assert len(within(60, lambda: run(tiny(), noises(3), INNER, workers=9, batch_size=1))) == 3


class TestMemory:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
            RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
            RuntimeError("MPS backend out of memory"),
            MemoryError(),
        ],
        ids=str,
    )
    def test_a_batch_that_does_not_fit_is_halved(self, error: Exception) -> None:
        sizes: list[int] = []

        def listen(images: Tensor) -> None:
            sizes.append(len(images))
            if len(images) > 3:
                raise error

        events: list[tuple[str, dict[str, Any]]] = []
        log_event = lambda event, **details: events.append((event, details))  # noqa: E731
        result = run(tiny(listen), noises(20), INNER, batch_size=8, log_event=log_event)
        # The batch size stays small. The two ones are images of the first batch, which are run alone once.
        assert sizes == [8, 4, 2, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]
        assert [details for event, details in events if event == "out of memory"] == [
            {"pictures": 8, "from_now_on": 4},
            {"pictures": 4, "from_now_on": 2},
        ]
        for ours, theirs in zip(result, run(tiny(), noises(20), INNER, batch_size=2)):
            assert_equal(ours, theirs)

    def test_a_picture_that_does_not_fit_even_alone(self) -> None:
        def listen(images: Tensor) -> None:
            if (images.mean((1, 2, 3)) > 1.5).any():
                raise torch.OutOfMemoryError("CUDA out of memory")

        items = noises(6)
        items[1] = white()
        result = run(tiny(listen), items, INNER)
        assert str(result[1]).startswith("white.png: does not fit into memory, even at batch size 1: use a smaller")
        assert [isinstance(item, ExplainedImage) for item in result] == [True, False, True, True, True, True]

    def test_tensors_of_a_batch_that_did_not_fit_are_freed(self) -> None:
        """Check that the tensors of the full batch are gone when its half is tried."""
        refs: list[weakref.ref[Tensor]] = []
        alive: list[bool] = []

        def listen(images: Tensor) -> None:
            alive.extend(tensor_ref() is not None for tensor_ref in refs)
            if len(images) > 2:
                large = images * 2
                refs.append(weakref.ref(large))
                raise torch.OutOfMemoryError("CUDA out of memory")

        assert len(run(tiny(listen), noises(4), INNER)) == 4
        assert alive
        assert not any(alive)

    @pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), KeyError("x")])
    def test_other_errors_are_raised(self, error: Exception) -> None:
        assert not is_out_of_memory(error)


class Unwritable(GradcamError):
    """The error that the command line raises for a full disk."""


class TestEndings:
    @pytest.mark.parametrize("error", [Unwritable("the disk is full"), ZeroDivisionError("unexpected"), SystemExit(5)])
    def test_an_error_of_finish_is_raised_at_its_image(self, error: BaseException) -> None:
        def finish(fetched: HashedItem, result: Any) -> str:
            if fetched.item.name.endswith("7.png"):
                raise error
            time.sleep(0.02)  # The error occurs before the earlier images are finished.
            return fetched.item.name

        names: list[str] = []
        with pytest.raises(type(error)) as caught:
            names.extend(explain_items(tiny(), INNER, noises(40), finish=finish, batch_size=4, workers=4))
        assert caught.value is error
        assert names == [item.name for item in noises(7)]
        assert pixel_threads() == []

    def test_closing_cancels_tasks_that_have_not_begun(self) -> None:
        begun: list[str] = []
        gate = threading.Event()

        def finish(fetched: HashedItem, result: Any) -> str:
            begun.append(fetched.item.name)
            if len(begun) > 1:
                gate.wait(20)
            return fetched.item.name

        stream = explain_items(tiny(), INNER, noises(40), finish=finish, batch_size=4, workers=1)
        assert next(stream) == "folder/000.png"
        assert len(pixel_threads()) == 1
        timer = threading.Timer(2, gate.set)
        timer.start()
        within(30, stream.close)
        timer.join()
        assert pixel_threads() == []
        assert len(begun) <= 2  # the one that was returned, and the one that was running

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_an_interruption_of_the_consumer(self, error: type[BaseException]) -> None:
        stream = explain_items(tiny(), INNER, noises(40), finish=name, batch_size=4, workers=3)
        next(stream)
        with pytest.raises(error):
            stream.throw(error())  # type: ignore[attr-defined]
        assert pixel_threads() == []
        abandoned = explain_items(tiny(), INNER, noises(40), finish=name, batch_size=4, workers=3)
        next(abandoned)
        del abandoned
        assert pixel_threads() == []

    def test_an_interruption_of_the_model(self) -> None:
        def listen(images: Tensor) -> None:
            batches.append(len(images))
            if len(batches) == 3:
                raise KeyboardInterrupt

        batches: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            run(tiny(listen), noises(40), INNER)
        assert len(batches) == 3
        assert pixel_threads() == []

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process there")
    def test_ctrl_c_ends_a_run_that_waits(self) -> None:
        code = """
import itertools, os, time
from gradcam.sources.contents import InputImage
from tests.batch.test_pipeline import INNER, Content, explain_items, noise, pixel_threads, tiny

def finish(fetched, found):
    os.write(1, b"finishes\\n")  # a line at once: two threads finish
    time.sleep(0.3)

items = (InputImage(f"{i}.png", Content(noise(0))) for i in itertools.count())
try:
    for _ in explain_items(tiny(), INNER, items, finish=finish, batch_size=4, workers=2):
        pass
except KeyboardInterrupt:
    print("stopped", len(pixel_threads()), flush=True)
"""
        command, folder = [sys.executable, "-c", code], Path(__file__).parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
            assert process.stdout is not None
            for _ in range(3):
                assert process.stdout.readline() == "finishes\n"
            process.send_signal(signal.SIGINT)
            remaining, _ = process.communicate(timeout=60)
        assert remaining.splitlines()[-1] == "stopped 0"
        assert process.returncode == 0

    def test_items_that_cannot_be_listed_to_their_end(self) -> None:
        def source() -> Iterator[InputImage]:
            yield from noises(2)
            raise GradcamError("the list ends in the middle of a line")

        with pytest.raises(GradcamError, match="the list ends"):
            run(tiny(), source(), INNER, batch_size=1)

    def test_no_thread_can_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if len(pixel_threads()) == 2:
                raise RuntimeError("can't start new thread")
            started(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run(tiny(), noises(3), INNER, workers=4)


class TestThreads:
    def test_the_model_runs_in_the_callers_thread(self) -> None:
        threads: list[threading.Thread] = []
        run(tiny(lambda images: threads.append(threading.current_thread())), noises(9), INNER)
        assert set(threads) == {threading.current_thread()}
        assert len(threads) >= 3

    def test_images_are_processed_in_threads_of_low_priority(self) -> None:
        thread_settings: list[tuple[int, int, int]] = []

        def note() -> None:
            nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) if sys.platform == "linux" else 10
            thread_settings.append((torch.get_num_threads(), cv2.getNumThreads(), nice))

        class Noting(Content):
            def read(self) -> bytes:
                note()
                return super().read()

        def finish(fetched: HashedItem, result: Any) -> None:
            note()

        before = torch.get_num_threads()
        usual = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else 0
        torch.set_num_threads(2)
        try:
            in_model: list[int] = []
            classifier = tiny(lambda images: in_model.append(torch.get_num_threads()))
            items = [InputImage(f"{i}.png", Noting(noise(i))) for i in range(6)]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(computing, "count_cores", lambda: 2)
                list(explain_items(classifier, INNER, items, finish=finish, batch_size=3, workers=2))
                assert within(10, torch.get_num_threads) == 2  # Threads that start later use this number.
                patch.setattr(computing, "count_cores", lambda: 1)
                list(explain_items(classifier, INNER, items, finish=finish, batch_size=3, workers=2))
            # When a model is first used, each image of the first batch is also run alone.
            assert in_model == [2] * (2 + 3) + [1] * 2
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)
        assert len(thread_settings) == 24
        assert set(thread_settings) == {(1, 1, min(usual + 10, 19))}
        if sys.platform == "linux":
            assert os.getpriority(os.PRIO_PROCESS, 0) == usual

    def test_the_last_of_several_runs_restores_opencv(self) -> None:
        before = cv2.getNumThreads()
        cv2.setNumThreads(2)
        try:
            options: Any = {"finish": name, "batch_size": 2, "workers": 1}
            first, second = (explain_items(tiny(), INNER, noises(9), **options) for _ in range(2))
            next(first), next(second)
            first.close()  # type: ignore[attr-defined]
            assert cv2.getNumThreads() == 1
            second.close()  # type: ignore[attr-defined]
            assert cv2.getNumThreads() == 2
        finally:
            cv2.setNumThreads(before)


class TestSizes:
    def test_batches_have_the_same_limits_for_all_needed_images(self) -> None:
        items = noises(10)
        batches = list(cut_batches(iter(items), 4, lambda item: item is items[1] or item is items[9]))
        assert [(batch.start, batch.items, batch.needed) for batch in batches] == [
            (0, items[:4], [False, True, False, False]),
            (8, items[8:], [False, True]),
        ]

    def test_the_default_batch_size(self) -> None:
        assert choose_batch_size(tiny()) == 8
        elsewhere: Any = SimpleNamespace(device=torch.device("cuda"))
        assert choose_batch_size(elsewhere) == 32

    @pytest.mark.parametrize("name", ["batch_size", "workers"])
    @pytest.mark.parametrize("value", [0, -1, 2.0, True, "4", None])
    def test_invalid_counts_are_rejected(self, name: str, value: Any) -> None:
        with pytest.raises(GradcamError, match=f"{name} is {value!r}, expected .*, from 1 to [0-9]+"):
            run(tiny(), noises(1), INNER, **{name: value})

    def test_each_batch_is_logged(self) -> None:
        events: list[tuple[str, dict[str, Any]]] = []
        items = noises(7)
        log_event = lambda event, **details: events.append((event, details))  # noqa: E731
        run(tiny(), items, INNER, batch_size=3, is_needed=lambda item: item not in items[3:6], log_event=log_event)
        logged = [(event, details["start"], details["pictures"]) for event, details in events]
        assert logged == [("batch", 0, 3), ("batch", 6, 1)]
        assert all(0 < details["seconds"] < 60 for _, details in events)


class TestStreaming:
    @pytest.fixture
    def folder(self, tmp_path: Path, photo: Any) -> Path:
        for image in NAMES[:4]:
            (tmp_path / image).write_bytes(photo(image).read_bytes())
        (tmp_path / "broken.jpg").write_bytes(b"nothing")
        return tmp_path

    def test_an_archive_gives_the_results_of_its_folder(self, folder: Path, classifier: gradcam.Classifier) -> None:
        with zipfile.ZipFile(folder / "all.zip", "w") as archive:
            for path in sorted(folder.glob("*.*")):
                if path.suffix != ".zip":
                    archive.write(path, path.name)
        plain, packed = (list(explain_files(folder / name, classifier)) for name in ("", "all.zip"))
        assert [item.name for item in packed] == [item.name for item in plain]
        assert {item.path for item in packed} == {None}
        for result, expected in zip(packed, plain):
            assert str(result.error) == str(expected.error)
            for key, explanation in result.explanations.items():
                assert torch.equal(explanation.heatmaps, expected.explanations[key].heatmaps)

    def test_every_picture_has_its_result_and_a_broken_one_stops_nothing(self, folder: Path, classifier: Any) -> None:
        results = list(explain_files(folder))
        assert [result.name for result in results] == sorted([*NAMES[:4], "broken.jpg"])
        for item in results:
            assert isinstance(item, FileResult)
            assert item.path == folder / item.name
            if item.name == "broken.jpg":
                assert str(item.error) == "broken.jpg: is not an image in a supported format"
                assert (item.explanations, item.attributions, item.predictions) == ({}, (), ())
                continue
            assert item.error is None
            alone = classifier.explain(folder / item.name)
            ours = item.explanations["layer4", "gradcam"]
            torch.testing.assert_close(ours.heatmaps, alone.heatmaps, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(torch.tensor(ours.overlay().astype(float)), torch.tensor(alone.overlay().astype(float)), rtol=0, atol=2)  # fmt: skip  # noqa: E501
            assert item.predictions[0].index == alone.probabilities().argmax().item()

    def test_several_layers_methods_and_attributions(self, folder: Path, classifier: gradcam.Classifier) -> None:
        for image in ("broken.jpg", *NAMES[1:4]):
            (folder / image).unlink()
        (result,) = explain_files(
            [folder], classifier, layers=["layer4", "layer3", "layer4"],
            methods=["gradcam", "guided-gradcam", "layercam"], target=["espresso", 282], evidence="positive",
        )  # fmt: skip
        expected = classifier.compare(
            folder / NAMES[0], layers=["layer4", "layer3"], methods=["gradcam", "layercam"], target=[["espresso", 282]]
        )
        assert result.explanations.keys() == expected.keys()
        for key, explanation in expected.items():
            assert result.explanations[key].classes.tolist() == [[967, 282]]  # type: ignore[union-attr]
            torch.testing.assert_close(result.explanations[key].maps, explanation.maps, rtol=1e-5, atol=1e-5)
        assert [attribution.layer for attribution in result.attributions] == ["layer4", "layer3"]
        alone = classifier.attribute(folder / NAMES[0], layer="layer3", target=[["espresso", 282]])
        torch.testing.assert_close(result.attributions[1].values, alone.values, rtol=1e-4, atol=1e-5)

    def test_methods_keep_their_options(self, folder: Path) -> None:
        batch_sizes: list[int] = []
        classifier, rise = tiny(lambda images: batch_sizes.append(len(images))), gradcam.METHODS["rise"].using(masks=20)
        (result,) = explain_files(folder / NAMES[0], classifier, methods=[rise])
        assert list(result.explanations) == [("input", "rise")]
        assert sum(batch_sizes) < 100  # The method's default is 4000 masks.
        smooth = gradcam.attributions.ATTRIBUTIONS["smoothgrad"]
        both = [gradcam.METHODS["rise"].using(masks=30), rise, "gradcam", smooth]
        (result,) = explain_files(folder / NAMES[0], classifier, methods=both)
        assert set(result.explanations) == {("input", "rise"), ("input", "rise-masks=20"), ("inner.4", "gradcam")}
        assert [attribution.method for attribution in result.attributions] == ["smoothgrad"]

    @pytest.mark.parametrize(
        ("target", "classes"),
        [
            ("espresso", [967]),
            (7, [7]),
            ([7, "espresso"], [7, 967]),
            ([[7, 8]], [7, 8]),
            (torch.tensor([7, 8]), [7, 8]),
            (ClassTarget("espresso", score="probability"), [967]),
            (ClassTarget(top=2), None),
        ],
        ids=str,
    )
    def test_targets(self, folder: Path, classifier: Any, target: Any, classes: list[int] | None) -> None:
        (folder / "broken.jpg").unlink()
        for explain_file in explain_files(str(folder), classifier, target=target, batch_size=3, workers=1):
            ours = explain_file.explanations["layer4", "gradcam"]
            probabilities = classifier.explain(folder / explain_file.name).probabilities()[0]
            assert ours.classes.tolist() == [classes or probabilities.topk(2).indices.tolist()]  # type: ignore[union-attr]
            if isinstance(target, ClassTarget) and target.score == "probability":
                torch.testing.assert_close(ours.scores[0, 0], ours.probabilities()[0, 967])

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"layers": "layer4"}, LayerError, "layers is 'layer4', expected a list"),
            ({"layers": []}, LayerError, "expected a list of at least one"),
            ({"classifier": "resnet50"}, ModelError, "classifier is 'resnet50', expected a model from gradcam.load_"),
            ({"inputs": None}, InputError, "The inputs are None, expected paths"),
            ({"target": ClassTarget(top=1001)}, TargetError, "top 1001 classes were requested, .* model has 1000"),
            ({"layers": ["layer9"]}, LayerError, "layer9"),
            ({"methods": "gradcam"}, GradcamError, "methods is 'gradcam', expected a list"),
            ({"methods": ["guided-gradcam", "gradcm"]}, GradcamError, "gradcm"),
            ({"methods": ["gradcam-pp"], "evidence": "signed"}, GradcamError, "positive evidence only"),
            ({"smoothing": "much"}, GradcamError, "smoothing is 'much'"),
            ({"target": "espreso"}, TargetError, "nearest: 'espresso'"),
            ({"target": 1000}, TargetError, "Class 1000 does not exist"),
            ({"target": [[1], [2]]}, TargetError, "does not fit"),
            ({"batch_size": 0}, GradcamError, "batch_size is 0"),
            ({"workers": 0}, GradcamError, "workers is 0"),
        ],
        ids=str,
    )
    def test_invalid_combinations_are_refused_at_once(
        self, folder: Path, classifier: gradcam.Classifier, options: Any, error: type[GradcamError], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            explain_files(**({"inputs": folder, "classifier": classifier} | options))


@pytest.mark.cuda
class TestCuda:
    def test_it_agrees_with_the_cpu(self, classifier: gradcam.Classifier, photo: Any) -> None:
        request = ExplainRequest(layers=["layer4"])
        gpu_classifier = gradcam.load_classifier(device="cuda")
        ours = run(gpu_classifier, files(photo("")) * 4, request, batch_size=8, workers=4)
        for result, expected in zip(ours, run(classifier, files(photo("")), request) * 4):
            assert map_of(result).heatmaps.device.type == "cpu"
            torch.testing.assert_close(map_of(result).heatmaps, map_of(expected).heatmaps, rtol=0, atol=2e-2)

    def test_images_are_uploaded_to_the_gpu(self, photo: Any) -> None:
        classifier = gradcam.load_classifier(device="cuda")
        upload = pipeline.find_upload(classifier.device)
        assert upload is not None
        prepared = classifier.prepare(photo("koala.webp"))
        uploaded = upload(prepared.image)
        assert uploaded.is_cuda
        assert torch.equal(uploaded.cpu(), prepared.image)

    @pytest.mark.parametrize(
        "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")], ids=str
    )
    def test_a_failed_upload_is_no_failed_image(self, photo: Any, monkeypatch: Any, error: RuntimeError) -> None:
        def full(image: Tensor) -> Tensor:
            raise error

        monkeypatch.setattr(Tensor, "pin_memory", full)
        classifier = gradcam.load_classifier(device="cuda")
        results = run(classifier, files(photo("")), ExplainRequest(layers=["layer4"]))
        assert all(isinstance(item, ExplainedImage) for item in results)


def test_on_the_cpu_nothing_is_uploaded() -> None:
    assert pipeline.find_upload(torch.device("cpu")) is None


def test_no_thread_writes_after_an_interruption() -> None:
    class Interrupted(SimpleNamespace):
        done, log = (), staticmethod(lambda event, **details: None)

        def append(self, record: Any, files: Any) -> None:
            raise KeyboardInterrupt

    work = BatchWork(tiny(), PIXELS, noises(12), batch_size=2, workers=2)
    saver = SimpleNamespace(save=lambda fetched, result: SimpleNamespace(record=None, files={}), saving=None)
    with pytest.raises(KeyboardInterrupt) as caught:
        list(explain_to_run(Interrupted(), saver, work))  # type: ignore[arg-type]
    assert pixel_threads() == []
    del caught  # The traceback has kept the frames alive until here, as it does in an exception handler.


def test_a_result_whose_record_was_interrupted_is_recorded_at_the_end() -> None:
    class Interrupted(SimpleNamespace):
        done, failed, log = (), (), staticmethod(lambda event, **details: None)

        def append(self, record: Record, files: Any) -> Record:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            self.names.append(record.image)
            return record

    def save(fetched: HashedItem, result: Any) -> Any:
        saved.append(fetched.item.name)
        return SimpleNamespace(record=Record(fetched.item.name, "tiny"), files={}, seconds=0.0)

    saved: list[str] = []
    results = Interrupted(names=[], calls=0)
    work = BatchWork(tiny(), PIXELS, noises(8), batch_size=2, workers=2)
    with pytest.raises(KeyboardInterrupt):
        list(explain_to_run(results, SimpleNamespace(save=save, saving=None), work))  # type: ignore[arg-type]
    assert sorted(results.names) == sorted(saved), "each that was saved has a record, and one alone"
