"""Process images on the model's device: decode and resize the model's inputs, and draw and encode overlays."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gradcam.batch.compute import LogEvent
from gradcam.batch.image_results import DrawnImage, ExplainedImage, ExplainRequest, ExplanationResult
from gradcam.batch.read_items import PendingImage, ReadItem, prepare_on_cpu
from gradcam.batch.result_names import OutputOptions
from gradcam.errors import DeviceError
from gradcam.hooks.memory import is_out_of_memory
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

# Images in flight may use 1/8 of the device's memory.
DEVICE_MEMORY_DIVISOR = 8
# Images in flight may use 1 GiB if the device is the CPU.
CPU_BUDGET_BYTES = 2**30
# The number of bytes of pixels that a stage processes at once. Resizing and drawing have lower limits, because they need
# several times as much memory for intermediate results.
STAGE_BUDGET_BYTES = {"decode": 2**28, "resize": 2**26, "draw": 2**25, "encode": 2**28}
JPEG_SUFFIXES = (".jpg", ".jpeg")
RESIZER = "PyTorch"
# Replaces heatmaps that are no longer needed, because their overlays are drawn.
EMPTY_HEATMAP = torch.empty(0, dtype=torch.float32, device="cpu")


def find_device_codec(
    pixels: str, classifier: Classifier, request: ExplainRequest | None = None, device: str | None = None
) -> Codec | None:
    """Return the codec for decoding and encoding on the device, or None if images are processed on the CPU.

    `device` names the device that runs the models; None means the classifier's device. Raises `DeviceError` if `pixels`
    is "device" and the device cannot process the images.
    """
    check_choice(pixels, "pixels", PIXEL_DEVICES)
    if pixels != "device":
        return None
    target_device = classifier.device if device is None else torch.device(device)
    obstacle = _find_device_obstacle(classifier, request)
    codec = find_codec(target_device) if obstacle is None else None
    if codec is None:
        missing_decoder = (
            f"JPEG cannot be decoded on {target_device} (this needs CUDA, and torchcodec 0.16 or torchvision)"
        )
        raise DeviceError(f"Images cannot be processed on the device: {obstacle or missing_decoder}. Use --pixels cpu.")
    return codec


def _find_device_obstacle(classifier: Classifier, request: ExplainRequest | None) -> str | None:
    preprocess = classifier.preprocess
    if classifier.task != "classification":
        return f"this needs a classifier, but {classifier.name} is a model for {classifier.task}"
    if classifier.fit != "crop":
        return f"this needs the fit 'crop', but the fit is '{classifier.fit}'"
    if classifier.reader is not read_image_file:
        return "the reader is user-defined"
    if not isinstance(preprocess, Preprocessing) or preprocess.channels != 3:
        return "the model's preprocessing is not a plain resize and crop of RGB images"
    return None if request is None or request.make_page is None else "pages are made on the CPU"


def describe_image_processing(codec: Codec, saving: OutputOptions) -> dict[str, str]:
    """Return the image libraries for run.json, because they influence the last digits of results."""
    return {
        "decoder": codec.name,
        "resizer": RESIZER,
        "encoder": codec.name if _encodes_on_device(saving) else "OpenCV",
    }


def _encodes_on_device(saving: OutputOptions | None) -> bool:
    return _draws_on_device(saving) and saving is not None and saving.suffix in JPEG_SUFFIXES


def _draws_on_device(saving: OutputOptions | None) -> bool:
    """Return True if only overlays are written. All other outputs are drawn on the CPU."""
    return saving is not None and saving.kinds == ("overlay",) and not saving.views


class MemoryGate:
    """Admits batches in order, as long as the bytes of their images fit into a budget.

    A batch larger than the budget runs alone. No thread waits: `enter` and `leave` call the `start` functions of all
    batches that now fit.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._used, self._next = budget, 0, 0
        self._waiting: dict[int, tuple[int, Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def enter(self, number: int, size: int, start: Callable[[], None]) -> None:
        """Queue the batch with this number, counted from 0."""
        with self._lock:
            self._waiting[number] = size, start
        self._start_next_batches()

    def leave(self, size: int) -> None:
        """Free the memory of a finished batch."""
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


@dataclass
class Stage:
    """One step of image processing on the device. Items are processed in parts that fit into the device's memory.

    If even a single item does not fit, or if the device rejects it, a fallback processes the item on the CPU.
    """

    name: str
    device: torch.device
    log_event: LogEvent
    max_images: int = 2**10  # Images per part.

    def run(
        self,
        process: Callable[[Sequence[ItemT]], Sequence[OutputT]],
        items: Sequence[ItemT],
        fallback: Callable[[ItemT], OutputT],
        count_bytes: Callable[[ItemT], int],
    ) -> list[OutputT]:
        """Return the output of `process`, or else of `fallback`, for each item.

        `count_bytes` returns the number of bytes of an item. Raises `DeviceError` if the device is lost.
        """
        outputs: list[OutputT] = []
        while len(outputs) < len(items):
            part_size = max(
                1, min(self.max_images, STAGE_BUDGET_BYTES[self.name] // max(1, count_bytes(items[len(outputs)])))
            )
            outputs += self._run_part(process, items[len(outputs) : len(outputs) + part_size], fallback)
        return outputs

    def _run_part(
        self,
        process: Callable[[Sequence[ItemT]], Sequence[OutputT]],
        part: Sequence[ItemT],
        fallback: Callable[[ItemT], OutputT],
    ) -> Sequence[OutputT]:
        try:
            return process(part)
        except Exception as error:
            check_device(self.device, error)
            lacks_memory = is_out_of_memory(error)
        # Free memory outside the except block, because the error's traceback keeps tensors alive.
        if lacks_memory:
            gc.collect()
            torch.cuda.empty_cache()  # Does nothing without CUDA.
        if len(part) == 1:
            reason = "out of memory" if lacks_memory else "refused"
            self.log_event("moved to the CPU", stage=self.name, why=reason)
            return [fallback(part[0])]
        if lacks_memory:
            self.max_images = len(part) // 2
            self.log_event("out of memory", stage=self.name, pictures=len(part), from_now_on=self.max_images)
            return self._run_part(process, part[: self.max_images], fallback)
        return [output for item in part for output in self._run_part(process, [item], fallback)]


class DevicePixels:
    """Processes the images of a run on the device, each step on its own CUDA stream. Thread-safe."""

    def __init__(
        self,
        classifier: Classifier,
        codec: Codec,
        *,
        log_event: LogEvent,
        saving: OutputOptions | None = None,
        budget: int | None = None,
    ) -> None:
        self._classifier, self._codec, self._saving = classifier, codec, saving
        self._device = classifier.device
        self._preprocess = cast(Preprocessing, classifier.preprocess)
        is_gpu = self._device.type == "cuda"
        self._streams = {
            name: torch.cuda.Stream(self._device) if is_gpu else None for name in ("prepare", "model", "draw")
        }
        self._locks = {name: threading.Lock() for name in self._streams}
        self._stages = {name: Stage(name, self._device, log_event) for name in ("decode", "resize", "draw", "encode")}
        default_budget = (
            torch.cuda.get_device_properties(self._device).total_memory // DEVICE_MEMORY_DIVISOR
            if is_gpu
            else CPU_BUDGET_BYTES
        )
        self.memory_gate = MemoryGate(default_budget if budget is None else budget)

    @contextlib.contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Run the body on the named CUDA stream, one thread at a time, and wait until the device has finished.

        Decoders and encoders use streams of their own. Without the wait, they could overwrite memory that unfinished
        work on this stream still uses.
        """
        stream = self._streams[name]
        with self._locks[name], torch.cuda.stream(stream):  # A stream of None changes nothing.
            yield
            try:
                if stream is not None:
                    stream.synchronize()
            except RuntimeError as error:  # Synchronising reports errors of any earlier work on the stream.
                check_device(self._device, error)
                raise

    def prepare(self, reads: Sequence[ReadItem]) -> list[ReadItem]:
        """Decode and preprocess the pending images, and return all images.

        The pixels and model inputs of pending images are then on the device, unless a step fell back to the CPU.
        """
        pending = [read.pending for read in reads if read.pending is not None]
        with self.on_stream("prepare"):
            prepared = iter(self._prepare(pending))
        return [read if read.pending is None else replace(read, picture=next(prepared), pending=None) for read in reads]

    def _prepare(self, pending: Sequence[PendingImage]) -> list[Any]:
        prepared: dict[int, Any] = {}
        groups: dict[object, list[tuple[int, Tensor | None]]] = {}
        for same_kind in _group(
            pending, key=lambda item: (item.header is None, item.header is not None and item.header.is_grey)
        ):
            items = [item for _, item in same_kind]
            decoded = self._stages["decode"].run(self._decode, items, lambda item: None, lambda item: item.size)
            for (position, _), pixels in zip(same_kind, decoded):
                groups.setdefault(None if pixels is None else tuple(pixels.shape), []).append((position, pixels))
        for position, _ in groups.pop(None, []):
            prepared[position] = prepare_on_cpu(self._classifier, pending[position])
        for group in groups.values():
            group_pixels = [cast(Tensor, pixels) for _, pixels in group]
            outputs = self._stages["resize"].run(self._resize, group_pixels, self._resize_on_cpu, Tensor.numel)
            prepared |= {position: item for (position, _), item in zip(group, outputs)}
        return [prepared[position] for position in range(len(pending))]

    def _decode(self, part: Sequence[PendingImage]) -> list[Tensor | None]:
        """Return the images on the device, as upright RGB tensors, uint8 (3,H,W)."""
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
        preprocess = self._preprocess
        top, left, height, width = preprocess.find_part(*decoded[0].shape[1:])
        box = (left, top, left + width, top + height)
        images = on_device.resize(torch.stack(list(decoded)), preprocess.size, box, preprocess.interpolation).div_(255)
        mean, std = (_to_channel_tensor(values, self._device) for values in (preprocess.mean, preprocess.std))
        images.sub_(mean).div_(std)
        hwc_images = [cast(Any, image.permute(1, 2, 0)) for image in decoded]
        return [Prepared(Reading(pixels, pixels), image) for pixels, image in zip(hwc_images, images)]

    def _resize_on_cpu(self, image: Tensor) -> Prepared:
        pixels = _to_pixels(image)
        return self._classifier.prepare(Reading(pixels, pixels))

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """Draw overlays or copy data to the CPU, and return results that hold no data on the device.

        If the run saves only overlays, the device draws them, and also encodes them if they are JPEG files. Otherwise
        images and heatmaps are copied to the CPU.
        """
        image_results = [result for result in results if isinstance(result, ExplainedImage)]
        with self.on_stream("draw"):
            drawn = self._draw(image_results) if _draws_on_device(self._saving) else {}
            finished = iter(
                [_move_result_to_cpu(result, drawn.get(position)) for position, result in enumerate(image_results)]
            )
        return [next(finished) if isinstance(result, ExplainedImage) else result for result in results]

    def _draw(self, results: Sequence[ExplainedImage]) -> Mapping[int, Sequence[DrawnImage]]:
        """Return the overlays of each result by position. Results that the device cannot draw are left out."""
        jobs = [
            (position, map_result)
            for position, result in enumerate(results)
            if _is_drawable(result)
            for map_result in result.results
        ]
        overlays_by_position: dict[int, list[DrawnImage | None]] = {position: [] for position, _ in jobs}
        slots = []
        for position, _ in jobs:
            slots.append(len(overlays_by_position[position]))
            overlays_by_position[position].append(None)
        for group in _group([map_result for _, map_result in jobs], key=_find_overlay_group):
            map_results = [map_result for _, map_result in group]
            overlays = self._stages["draw"].run(self._overlay, map_results, lambda map_result: None, _count_bytes)
            finished = [(number, overlay) for (number, _), overlay in zip(group, overlays) if overlay is not None]
            images: Sequence[DrawnImage] = []
            if _encodes_on_device(self._saving):
                images = self._stages["encode"].run(
                    self._encode, [overlay for _, overlay in finished], _to_pixels, Tensor.numel
                )
            else:
                images = [_to_pixels(overlay) for _, overlay in finished]
            for (number, _), image in zip(finished, images):
                overlays_by_position[jobs[number][0]][slots[number]] = image
        complete = {
            position: image_overlays
            for position, image_overlays in overlays_by_position.items()
            if all(overlay is not None for overlay in image_overlays)
        }
        return cast(Mapping[int, Sequence[DrawnImage]], complete)

    def _overlay(self, results: Sequence[ExplanationResult]) -> list[Tensor | None]:
        sources, saving = (
            [cast(ImageExplanation, result.source) for result in results],
            cast(OutputOptions, self._saving),
        )
        images = torch.stack([cast(Tensor, source.images[0]).permute(2, 0, 1) for source in sources])
        heatmaps = torch.stack([source.heatmaps[0, result.k] for source, result in zip(sources, results)])
        style: Any = {"alpha": saving.alpha, "colormap": saving.colormap, "outline": True}
        signed = sources[0].evidence == "signed"
        return [*on_device.overlay(images, heatmaps, region=sources[0].regions[0], signed=signed, **style)]

    def _encode(self, overlays: Sequence[Tensor]) -> list[bytes]:
        return self._codec.encode(overlays, cast(OutputOptions, self._saving).quality)


def open_device_pixels(
    pixels: str,
    classifier: Classifier,
    request: ExplainRequest,
    *,
    log_event: LogEvent | None = None,
    saving: OutputOptions | None = None,
) -> DevicePixels | None:
    """Return a processor of images on the classifier's device, or None if images are processed on the CPU.

    Raises `DeviceError` as `find_device_codec` does.
    """
    codec = find_device_codec(pixels, classifier, request)
    if codec is None:
        return None
    return DevicePixels(classifier, codec, log_event=log_event or (lambda event, **details: None), saving=saving)


@functools.lru_cache(maxsize=16)
def _to_channel_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def _group(items: Sequence[ItemT], key: Callable[[ItemT], object]) -> list[list[tuple[int, ItemT]]]:
    """Return the items grouped by key, each item with its position in the input."""
    groups: dict[object, list[tuple[int, ItemT]]] = {}
    for position, item in enumerate(items):
        groups.setdefault(key(item), []).append((position, item))
    return list(groups.values())


def _is_drawable(result: ExplainedImage) -> bool:
    sources = [map_result.source for map_result in result.results]
    return all(isinstance(source, ImageExplanation) and isinstance(source.images[0], Tensor) for source in sources)


def _find_overlay_group(result: ExplanationResult) -> object:
    source = cast(ImageExplanation, result.source)
    return source.images[0].shape, source.heatmaps.shape[2:], source.regions[0], source.evidence


def _count_bytes(result: ExplanationResult) -> int:
    return cast(Tensor, result.source.images[0]).numel()


def _to_pixels(image: Tensor) -> Pixels:
    """Convert an image (3,H,W) to an array (H,W,3)."""
    return np.ascontiguousarray(to_numpy(image.permute(1, 2, 0)))


def _move_result_to_cpu(result: ExplainedImage, overlays: Sequence[DrawnImage] | None) -> ExplainedImage:
    """Return the result with no data on the device.

    If `overlays` are given, the heatmaps are dropped, and a placeholder of the same size replaces the image.
    """
    if overlays is None:
        maps = {key: _move_explanation_to_cpu(explanation) for key, explanation in result.maps.items()}
        attributions = [
            replace(explanation, images=[*map(to_numpy, explanation.images)]) for explanation in result.attributions
        ]
        return replace(result, maps=maps, attributions=attributions)
    shape = np.broadcast_to(np.uint8(0), tuple(result.picture.shape))
    maps = {
        key: replace(explanation, images=[shape], heatmaps=EMPTY_HEATMAP) for key, explanation in result.maps.items()
    }
    sources = {id(explanation): maps[key] for key, explanation in result.maps.items()}
    drawn_results = [
        replace(map_result, source=sources[id(map_result.source)], drawn_overlay=overlay)
        for map_result, overlay in zip(result.results, overlays)
    ]
    return replace(result, maps=maps, drawn_results=drawn_results)


def _move_explanation_to_cpu(explanation: ImageExplanation) -> ImageExplanation:
    images = [np.ascontiguousarray(to_numpy(image)) for image in explanation.images]
    return replace(explanation, images=images, heatmaps=explanation.heatmaps.cpu())
