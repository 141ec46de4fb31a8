"""Process images on the model's device: decode and resize the model's inputs, and draw and encode overlays."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gradcam.batch.compute import LogEvent, Stage, drop_event, map_groups
from gradcam.batch.image_results import DrawnImage, ExplainedImage, ExplainRequest, ExplanationResult
from gradcam.batch.read_items import PendingImage, ReadItem, prepare_on_cpu
from gradcam.batch.result_names import OutputOptions
from gradcam.errors import DeviceError
from gradcam.images import on_device
from gradcam.images.jpeg import Codec, find_codec, to_tensor
from gradcam.images.read import Pixels, to_numpy
from gradcam.models.classifier import Classifier
from gradcam.models.device import check_device
from gradcam.models.preprocess import Prepared, Preprocessing, Reading, read_image_file
from gradcam.models.results import ImageExplanation
from gradcam.options import PIXEL_DEVICES, check_choice

ItemT = TypeVar("ItemT")
OutputT = TypeVar("OutputT")

# The images of all unfinished batches may use at most 1/8 of a GPU's memory.
DEVICE_MEMORY_DIVISOR = 8
# If the device is the CPU, the images of all unfinished batches may use at most 1 GiB.
CPU_BUDGET_BYTES = 2**30
# The maximum number of bytes of pixels that a stage processes at once. Resizing and drawing have lower limits, because
# their intermediate results need several times the memory of the pixels.
STAGE_BUDGET_BYTES = {"decode": 2**28, "resize": 2**24, "draw": 2**25, "encode": 2**28}
JPEG_SUFFIXES = (".jpg", ".jpeg")
# After an overlay is drawn, this empty tensor replaces its heatmap to free memory.
EMPTY_HEATMAP = torch.empty(0, dtype=torch.float32, device="cpu")


def find_device_codec(
    pixels: str, classifier: Classifier, request: ExplainRequest | None = None, device: str | None = None
) -> Codec | None:
    """Return the device's JPEG codec, or None if images are processed on the CPU.

    `device` is the name of the device that runs the models. None means the classifier's device. Raises `DeviceError` if
    `pixels` is "device" but the device cannot process the images.
    """
    check_choice(pixels, "pixels", PIXEL_DEVICES)
    if pixels != "device":
        return None
    target_device = classifier.device if device is None else torch.device(device)
    obstacle = _find_device_obstacle(classifier, request)
    codec = find_codec(target_device) if obstacle is None else None
    if codec is None:
        needs = "this needs CUDA, and torchcodec 0.16 or torchvision"
        obstacle = obstacle or f"JPEG cannot be decoded on {target_device} ({needs})"
        raise DeviceError(f"Images cannot be processed on the device: {obstacle}. Use --pixels cpu.")
    return codec


def _find_device_obstacle(classifier: Classifier, request: ExplainRequest | None) -> str | None:
    preprocess = classifier.preprocess
    if classifier.task != "classification":
        return f"this needs a classifier, but {classifier.name} is a model for {classifier.task}"
    if classifier.fit != "crop":
        return f"this needs the fit 'crop', but the fit is '{classifier.fit}'"
    if classifier.reader is not read_image_file:
        return "images are read by a custom function (--reader)"
    if not isinstance(preprocess, Preprocessing) or preprocess.channels != 3:
        return "the model's preprocessing is not a plain resize and crop of RGB images"
    return None if request is None or request.make_page is None else "pages are made on the CPU"


def describe_image_processing(codec: Codec, saving: OutputOptions) -> dict[str, str]:
    """Return the names of the image libraries to record in run.json.

    The results of different libraries differ in the last digits.
    """
    encoder = codec.name if _encodes_on_device(saving) else "OpenCV"
    return {"decoder": codec.name, "resizer": "PyTorch", "encoder": encoder}


def _encodes_on_device(saving: OutputOptions | None) -> bool:
    return _draws_on_device(saving) and saving is not None and saving.suffix in JPEG_SUFFIXES


def _draws_on_device(saving: OutputOptions | None) -> bool:
    """Return True if the run writes only overlays. The device cannot draw other outputs."""
    return saving is not None and saving.kinds == ("overlay",) and not saving.views


class MemoryGate:
    """Starts batches in order, while the images of all running batches fit into a budget of bytes.

    A batch larger than the budget runs alone. `enter` and `leave` do not wait for memory. Both methods call the
    `start` functions of the waiting batches that fit into the budget.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._used, self._next = budget, 0, 0
        self._waiting: dict[int, tuple[int, Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def enter(self, number: int, size: int, start: Callable[[], None]) -> None:
        """Queue the batch with this number (from 0). `start` is called when there is memory for `size` bytes."""
        with self._lock:
            self._waiting[number] = size, start
        self._start_next_batches()

    def leave(self, size: int) -> None:
        """Return the `size` bytes of a finished batch to the budget."""
        with self._lock:
            self._used -= size
        self._start_next_batches()

    def _start_next_batches(self) -> None:
        while True:
            with self._lock:
                size, start = self._waiting.get(self._next, (0, None))
                if start is None or (self._used and self._used + size > self._budget):
                    return
                del self._waiting[self._next]
                self._used, self._next = self._used + size, self._next + 1
            start()


class DevicePixels:
    """Processes the images of a run on the device, each step on its own CUDA stream. Thread-safe."""

    def __init__(
        self,
        classifier: Classifier,
        codec: Codec,
        log_event: LogEvent = drop_event,
        saving: OutputOptions | None = None,
    ) -> None:
        self._classifier, self._codec, self._saving = classifier, codec, saving
        self._device = classifier.device
        is_gpu = self._device.type == "cuda"
        names = ("prepare", "model", "draw")
        self._streams = {name: torch.cuda.Stream(self._device) if is_gpu else None for name in names}
        self._locks = {name: threading.Lock() for name in self._streams}
        budgets = STAGE_BUDGET_BYTES.items()
        self._stages = {name: Stage(name, self._device, log_event, max_bytes=size) for name, size in budgets}
        budget = CPU_BUDGET_BYTES
        if is_gpu:
            budget = torch.cuda.get_device_properties(self._device).total_memory // DEVICE_MEMORY_DIVISOR
        self.memory_gate = MemoryGate(budget)

    @contextlib.contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Run the body of the with statement on the named CUDA stream, and wait until the device has finished.

        Only one thread at a time can use a stream. Decoders and encoders use separate streams. Without the wait,
        decoders and encoders could overwrite memory that unfinished work on this stream still uses.
        """
        stream = self._streams[name]
        with self._locks[name], torch.cuda.stream(stream):  # If the stream is None, the context has no effect.
            yield
            try:
                if stream is not None:
                    stream.synchronize()
            except RuntimeError as error:  # Synchronising reports errors of any earlier work on the stream.
                check_device(self._device, error)
                raise

    def prepare(self, reads: Sequence[ReadItem]) -> list[ReadItem]:
        """Decode and preprocess the pending images, and return all images.

        The outputs are on the device. If a step falls back to the CPU, its outputs are on the CPU.
        """
        pending = [read.pending for read in reads if read.pending is not None]
        with self.on_stream("prepare"):
            decoded = map_groups(pending, lambda item: item.header and item.header.is_grey, self._decode_group)
            pairs = list(zip(pending, decoded))
            prepared = iter(map_groups(pairs, lambda pair: getattr(pair[1], "shape", None), self._resize_group))
        return [read if read.pending is None else replace(read, picture=next(prepared), pending=None) for read in reads]

    def _decode_group(self, pending: Sequence[PendingImage]) -> list[Tensor | None]:
        return self._stages["decode"].run(self._decode, pending, lambda *_: None, lambda item: item.size)

    def _resize_group(self, pairs: Sequence[tuple[PendingImage, Tensor | None]]) -> list[Any]:
        images = [pixels for _, pixels in pairs if pixels is not None]
        if not images:
            return [prepare_on_cpu(self._classifier, item) for item, _ in pairs]
        return self._stages["resize"].run(self._resize, images, self._resize_on_cpu, Tensor.numel)

    def _decode(self, part: Sequence[PendingImage]) -> list[Tensor | None]:
        """Return upright RGB images on the device, uint8 (3,H,W)."""
        if isinstance(part[0].data, Reading):
            return [self._upload(cast(Reading, item.data).picture) for item in part]
        headers = [cast(Any, item.header) for item in part]
        images = self._codec.decode([to_tensor(cast(bytes, item.data)) for item in part], headers[0].is_grey)
        turns = [1 if self._codec.turns else header.turn for header in headers]
        return [on_device.apply_orientation(pixels, turn) for pixels, turn in zip(images, turns)]

    def _upload(self, array: Pixels) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cuda":
            pixels = pixels.pin_memory().to(self._device, non_blocking=True)
        return pixels.permute(2, 0, 1)

    def _resize(self, decoded: Sequence[Tensor]) -> list[Prepared]:
        preprocess = cast(Preprocessing, self._classifier.preprocess)
        top, left, height, width = preprocess.find_part(*decoded[0].shape[1:])
        box = (left, top, left + width, top + height)
        images = on_device.resize(torch.stack(list(decoded)), preprocess.size, box, preprocess.interpolation).div_(255)
        mean, std = (_to_channel_tensor(values, self._device) for values in (preprocess.mean, preprocess.std))
        images.sub_(mean).div_(std)
        hwc_images = [cast(Any, image.permute(1, 2, 0)) for image in decoded]
        return [Prepared(Reading(pixels, pixels), image) for pixels, image in zip(hwc_images, images)]

    def _resize_on_cpu(self, image: Tensor, _: object) -> Prepared:
        pixels = _to_pixels(image)
        return self._classifier.prepare(Reading(pixels, pixels))

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """Return copies of the results that hold no data on the device.

        If the run writes only overlays, the device draws the overlays. If overlays are JPEG files, the device also
        encodes the overlays. In all other cases, images and heatmaps are copied to the CPU.
        """
        with self.on_stream("draw"):
            drawn = self._draw(results) if _draws_on_device(self._saving) else {}
            return [_move_result_to_cpu(result, drawn.get(position)) for position, result in enumerate(results)]

    def _draw(self, results: Sequence[Any]) -> Mapping[int, Sequence[DrawnImage]]:
        """Return a dict from a result's position to its overlays. Leave out results that the device cannot draw."""
        drawable = {position: result.results for position, result in enumerate(results) if _is_drawable(result)}
        map_results = [map_result for image_results in drawable.values() for map_result in image_results]
        images = iter(map_groups(map_results, _find_overlay_group, self._draw_group))
        overlays = {position: [next(images) for _ in image_results] for position, image_results in drawable.items()}
        complete = {position: row for position, row in overlays.items() if all(image is not None for image in row)}
        return cast(Mapping[int, Sequence[DrawnImage]], complete)

    def _draw_group(self, map_results: Sequence[ExplanationResult]) -> list[DrawnImage | None]:
        overlays = self._stages["draw"].run(self._overlay, map_results, lambda *_: None, _count_bytes)
        drawn = [overlay for overlay in overlays if overlay is not None]
        images: Iterable[DrawnImage] = map(_to_pixels, drawn)
        if _encodes_on_device(self._saving):
            images = self._stages["encode"].run(self._encode, drawn, _to_pixels, Tensor.numel)
        remaining = iter(images)
        return [None if overlay is None else next(remaining) for overlay in overlays]

    def _overlay(self, results: Sequence[ExplanationResult]) -> list[Tensor | None]:
        sources = [cast(ImageExplanation, result.source) for result in results]
        saving = cast(OutputOptions, self._saving)
        images = torch.stack([cast(Tensor, source.images[0]).permute(2, 0, 1) for source in sources])
        heatmaps = torch.stack([source.heatmaps[0, result.k] for source, result in zip(sources, results)])
        options: Any = {"region": sources[0].regions[0], "signed": sources[0].evidence == "signed", "outline": True}
        return [*on_device.overlay(images, heatmaps, **options, **saving.look)]

    def _encode(self, overlays: Sequence[Tensor]) -> list[bytes]:
        return self._codec.encode(overlays, cast(OutputOptions, self._saving).quality)


def open_device_pixels(
    pixels: str, classifier: Classifier, request: ExplainRequest, **options: Any
) -> DevicePixels | None:
    """Return an image processor for the classifier's device, or None if images are processed on the CPU.

    `options` are passed to `DevicePixels`. Raises the errors of `find_device_codec`.
    """
    codec = find_device_codec(pixels, classifier, request)
    return None if codec is None else DevicePixels(classifier, codec, **options)


@functools.lru_cache(maxsize=16)
def _to_channel_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def _is_drawable(result: Any) -> bool:
    sources = [map_result.source for map_result in result.results] if isinstance(result, ExplainedImage) else []
    is_on_device = (isinstance(item, ImageExplanation) and isinstance(item.images[0], Tensor) for item in sources)
    return bool(sources) and all(is_on_device)


def _find_overlay_group(result: ExplanationResult) -> object:
    source = cast(ImageExplanation, result.source)
    return source.images[0].shape, source.heatmaps.shape[2:], source.regions[0], source.evidence


def _count_bytes(result: ExplanationResult) -> int:
    return cast(Tensor, result.source.images[0]).numel()


def _to_pixels(image: Tensor, _: object = None) -> Pixels:
    """Convert an image tensor (3,H,W) to a NumPy array (H,W,3)."""
    return np.ascontiguousarray(to_numpy(image.permute(1, 2, 0)))


def _move_result_to_cpu(result: Any, overlays: Sequence[DrawnImage] | None) -> Any:
    """Return a copy of the result that holds no data on the device.

    If `overlays` are given, heatmaps are dropped, and a placeholder of the same size replaces the image.
    """
    if not isinstance(result, ExplainedImage):
        return result
    if overlays is None:
        maps = {key: _move_explanation_to_cpu(item) for key, item in result.maps.items()}
        attributions = [replace(item, images=[*map(to_numpy, item.images)]) for item in result.attributions]
        return replace(result, maps=maps, attributions=attributions)
    shape = np.broadcast_to(np.uint8(0), tuple(result.picture.shape))
    maps = {key: replace(item, images=[shape], heatmaps=EMPTY_HEATMAP) for key, item in result.maps.items()}
    sources = {id(item): maps[key] for key, item in result.maps.items()}
    pairs = zip(result.results, overlays)
    drawn = [replace(item, source=sources[id(item.source)], drawn_overlay=overlay) for item, overlay in pairs]
    return replace(result, maps=maps, drawn_results=drawn)


def _move_explanation_to_cpu(explanation: ImageExplanation) -> ImageExplanation:
    images = [np.ascontiguousarray(to_numpy(image)) for image in explanation.images]
    return replace(explanation, images=images, heatmaps=explanation.heatmaps.cpu())
