"""Pixels on the model's device: a batch decoded and prepared there before the model, drawn and encoded there behind it."""

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

from gradcam.batch.compute import Tell
from gradcam.batch.findings import Drawn, MapResult, PictureResult, Request
from gradcam.batch.names import Saving
from gradcam.batch.read import Read, Waiting, prepare_here
from gradcam.errors import DeviceError
from gradcam.hooks.memory import is_out_of_memory
from gradcam.images import on_device
from gradcam.images.jpeg import Codec, find_codec, to_tensor
from gradcam.images.read import Pixels, to_numpy
from gradcam.models.classifier import Classifier
from gradcam.models.device import check_device
from gradcam.models.preprocess import Prepared, Preprocessing, Reading, read_picture
from gradcam.models.results import ImageExplanation
from gradcam.options import PIXELS, check_choice

One = TypeVar("One")
Made = TypeVar("Made")

SHARE = 8  # of the device's memory, one part is for pictures in flight
IN_MEMORY = 2**30  # bytes for them where the device is the processor
# Bytes of pixels that each stage works on at once: resizing and drawing take several times as much.
AT_ONCE = {"decode": 2**28, "resize": 2**26, "draw": 2**25, "encode": 2**28}
ENCODED = (".jpg", ".jpeg")
RESIZER = "PyTorch"
NONE = torch.empty(0, dtype=torch.float32, device="cpu")  # in place of heatmaps that are drawn


def find_pixels(
    wanted: str, classifier: Classifier, request: Request | None = None, device: str | None = None
) -> Codec | None:
    """What decodes and encodes where pixels are to be on the device; None where they stay on the processor. `device`:
    where models compute, if that is not the classifier's own. Raises `DeviceError` for "device" where that cannot be."""
    check_choice(wanted, "pixels", PIXELS)
    if wanted != "device":
        return None
    place = classifier.device if device is None else torch.device(device)
    reason = _find_hindrance(classifier, request)
    codec = find_codec(place) if reason is None else None
    if codec is None:
        lack = f"JPEG cannot be decoded on {place} (this needs CUDA, and torchcodec 0.16 or torchvision)"
        raise DeviceError(f"Images cannot be processed on the device: {reason or lack}. Use --pixels cpu.")
    return codec


def _find_hindrance(classifier: Classifier, request: Request | None) -> str | None:
    own = classifier.preprocess
    if classifier.task != "classification":
        return f"this needs a classifier, but {classifier.name} is a model for {classifier.task}"
    if classifier.fit != "crop":
        return f"this needs the fit 'crop', but the fit is '{classifier.fit}'"
    if classifier.reader is not read_picture:
        return "the reader is user-defined"
    if not isinstance(own, Preprocessing) or own.channels != 3:
        return "the model's preprocessing is not a plain resize and crop of RGB images"
    return None if request is None or request.make_page is None else "pages are made on the CPU"


def describe_pixels(codec: Codec, saving: Saving) -> dict[str, str]:
    """What makes results differ in their last digits, for run.json."""
    return {"decoder": codec.name, "resizer": RESIZER, "encoder": codec.name if _encodes(saving) else "OpenCV"}


def _encodes(saving: Saving | None) -> bool:
    return _draws(saving) and saving is not None and saving.suffix in ENCODED


def _draws(saving: Saving | None) -> bool:
    """Whether overlays, and nothing else, are written: all else is drawn from the pictures on the processor."""
    return saving is not None and saving.kinds == ("overlay",) and not saving.views


class Gate:
    """Lets batches in, in their order, while there is room for their bytes; one alone always. Nobody waits here: what
    starts a batch is called when there is room, by whoever made it."""

    def __init__(self, budget: int) -> None:
        self._budget, self._used, self._next = budget, 0, 0
        self._waiting: dict[int, tuple[int, Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def enter(self, number: int, size: int, start: Callable[[], None]) -> None:
        """The batch of this number, from 0, wants in."""
        with self._lock:
            self._waiting[number] = size, start
        self._let_in()

    def leave(self, size: int) -> None:
        """A batch of that size is done with."""
        with self._lock:
            self._used -= size
        self._let_in()

    def _let_in(self) -> None:
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
    """One stage's work on the device, in parts that fit into its memory. What does not even alone, and what the device
    refuses, is done by `otherwise`, on the processor."""

    name: str
    device: torch.device
    tell: Tell
    largest: int = 2**10  # pictures

    def run(
        self,
        work: Callable[[Sequence[One]], Sequence[Made]],
        items: Sequence[One],
        otherwise: Callable[[One], Made],
        size: Callable[[One], int],
    ) -> list[Made]:
        """What `work` makes of each item, of so many bytes. Raises `DeviceError` where the device is lost."""
        made: list[Made] = []
        while len(made) < len(items):
            most = max(1, min(self.largest, AT_ONCE[self.name] // max(1, size(items[len(made)]))))
            made += self._try(work, items[len(made) : len(made) + most], otherwise)
        return made

    def _try(
        self, work: Callable[[Sequence[One]], Sequence[Made]], part: Sequence[One], otherwise: Callable[[One], Made]
    ) -> Sequence[Made]:
        try:
            return work(part)
        except Exception as error:
            check_device(self.device, error)
            lacks_memory = is_out_of_memory(error)
        # Outside of the handler: the error's traceback keeps tensors alive.
        if lacks_memory:
            gc.collect()
            torch.cuda.empty_cache()  # does nothing where there is no CUDA
        if len(part) == 1:
            why = "out of memory" if lacks_memory else "refused"
            self.tell("moved to the CPU", stage=self.name, why=why)
            return [otherwise(part[0])]
        if lacks_memory:
            self.largest = len(part) // 2
            self.tell("out of memory", stage=self.name, pictures=len(part), from_now_on=self.largest)
            return self._try(work, part[: self.largest], otherwise)
        return [one for each in part for one in self._try(work, [each], otherwise)]


class DevicePixels:
    """The stages of a run whose pixels are on the device, each on a stream of its own. Several threads may call them."""

    def __init__(
        self,
        classifier: Classifier,
        codec: Codec,
        *,
        tell: Tell,
        saving: Saving | None = None,
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
        self._stages = {name: Stage(name, self._device, tell) for name in ("decode", "resize", "draw", "encode")}
        usual = torch.cuda.get_device_properties(self._device).total_memory // SHARE if is_gpu else IN_MEMORY
        self.gate = Gate(usual if budget is None else budget)

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """What is computed within is on that stream, alone, and done at the end: decoders and encoders write, from streams
        of their own, to memory that another thread's work on this one could still be using."""
        stream = self._streams[name]
        with self._locks[name], torch.cuda.stream(stream):  # nothing is changed by None
            yield
            try:
                if stream is not None:
                    stream.synchronize()
            except RuntimeError as error:  # of whatever was computed there
                check_device(self._device, error)
                raise

    def prepare(self, reads: Sequence[Read]) -> list[Read]:
        """The same, with those that waited prepared, their pictures and the model's input on the device."""
        waiting = [each.waiting for each in reads if each.waiting is not None]
        with self.on("prepare"):
            made = iter(self._prepare(waiting))
        return [each if each.waiting is None else replace(each, picture=next(made), waiting=None) for each in reads]

    def _prepare(self, waiting: Sequence[Waiting]) -> list[Any]:
        here: dict[int, Any] = {}
        groups: dict[object, list[tuple[int, Tensor | None]]] = {}
        for kind in _group(
            waiting, key=lambda one: (one.header is None, one.header is not None and one.header.is_grey)
        ):
            each = [one for _, one in kind]
            pictures = self._stages["decode"].run(self._decode, each, lambda one: None, lambda one: one.size)
            for (place, _), picture in zip(kind, pictures):
                groups.setdefault(None if picture is None else tuple(picture.shape), []).append((place, picture))
        for place, _ in groups.pop(None, []):
            here[place] = prepare_here(self._classifier, waiting[place])
        for group in groups.values():
            found = [cast(Tensor, picture) for _, picture in group]
            made = self._stages["resize"].run(self._resize, found, self._resize_here, Tensor.numel)
            here |= {place: one for (place, _), one in zip(group, made)}
        return [here[place] for place in range(len(waiting))]

    def _decode(self, part: Sequence[Waiting]) -> list[Tensor | None]:
        """RGB, uint8 (3,H,W), upright."""
        if isinstance(part[0].data, Reading):
            return [self._upload(cast(Reading, one.data).picture) for one in part]
        headers = [cast(Any, one.header) for one in part]
        pictures = self._codec.decode([to_tensor(cast(bytes, one.data)) for one in part], headers[0].is_grey)
        turns = [1 if self._codec.turns else header.turn for header in headers]
        return [on_device.turn_upright(picture, turn) for picture, turn in zip(pictures, turns)]

    def _upload(self, picture: Pixels) -> Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(picture))
        if self._device.type == "cuda":
            pixels = pixels.pin_memory().to(self._device, non_blocking=True)
        return pixels.permute(2, 0, 1)

    def _resize(self, pictures: Sequence[Tensor]) -> list[Prepared]:
        own = self._preprocess
        top, left, height, width = own.find_part(*pictures[0].shape[1:])
        box = (left, top, left + width, top + height)
        images = on_device.resize(torch.stack(list(pictures)), own.size, box, own.interpolation).div_(255)
        mean, std = (_to_column(it, self._device) for it in (own.mean, own.std))
        images.sub_(mean).div_(std)
        shown = [cast(Any, picture.permute(1, 2, 0)) for picture in pictures]
        return [Prepared(Reading(it, it), image) for it, image in zip(shown, images)]

    def _resize_here(self, picture: Tensor) -> Prepared:
        pixels = _to_pixels(picture)
        return self._classifier.prepare(Reading(pixels, pixels))

    def finish(self, found: Sequence[Any]) -> list[Any]:
        """The same, without anything on the device: overlays are drawn there, and encoded, where these alone are saved;
        of all else the pictures and heatmaps come to the processor."""
        results = [each for each in found if isinstance(each, PictureResult)]
        with self.on("draw"):
            drawn = self._draw(results) if _draws(self._saving) else {}
            done = iter([_let_go(each, drawn.get(place)) for place, each in enumerate(results)])
        return [next(done) if isinstance(each, PictureResult) else each for each in found]

    def _draw(self, results: Sequence[PictureResult]) -> Mapping[int, Sequence[Drawn]]:
        """The overlays of each picture by its place; none of one that cannot be drawn here."""
        chosen = [(place, one) for place, each in enumerate(results) if _is_drawable(each) for one in each.results]
        drawn: dict[int, list[Drawn | None]] = {place: [] for place, _ in chosen}
        slots = []
        for place, _ in chosen:
            slots.append(len(drawn[place]))
            drawn[place].append(None)
        for group in _group([one for _, one in chosen], key=_find_form):
            each = [one for _, one in group]
            overlays = self._stages["draw"].run(self._overlay, each, lambda one: None, _count_bytes)
            given = [(number, it) for (number, _), it in zip(group, overlays) if it is not None]
            made: Sequence[Drawn] = []
            if _encodes(self._saving):
                made = self._stages["encode"].run(self._encode, [it for _, it in given], _to_pixels, Tensor.numel)
            else:
                made = [_to_pixels(it) for _, it in given]
            for (number, _), it in zip(given, made):
                drawn[chosen[number][0]][slots[number]] = it
        whole = {place: own for place, own in drawn.items() if all(it is not None for it in own)}
        return cast(Mapping[int, Sequence[Drawn]], whole)

    def _overlay(self, part: Sequence[MapResult]) -> list[Tensor | None]:
        sources, saving = [cast(ImageExplanation, one.source) for one in part], cast(Saving, self._saving)
        pictures = torch.stack([cast(Tensor, source.images[0]).permute(2, 0, 1) for source in sources])
        heatmaps = torch.stack([source.heatmaps[0, one.k] for source, one in zip(sources, part)])
        look: Any = {"alpha": saving.alpha, "colormap": saving.colormap, "outline": True}
        signed = sources[0].evidence == "signed"
        return [*on_device.overlay(pictures, heatmaps, region=sources[0].regions[0], signed=signed, **look)]

    def _encode(self, overlays: Sequence[Tensor]) -> list[bytes]:
        return self._codec.encode(overlays, cast(Saving, self._saving).quality)


def open_pixels(
    wanted: str, classifier: Classifier, request: Request, *, tell: Tell | None = None, saving: Saving | None = None
) -> DevicePixels | None:
    """The stages on the classifier's device; None where pixels stay on the processor. Raises as `find_pixels`."""
    codec = find_pixels(wanted, classifier, request)
    if codec is None:
        return None
    return DevicePixels(classifier, codec, tell=tell or (lambda event, **details: None), saving=saving)


@functools.lru_cache(maxsize=16)
def _to_column(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def _group(items: Sequence[One], key: Callable[[One], object]) -> list[list[tuple[int, One]]]:
    """Items that are alike, with their places."""
    groups: dict[object, list[tuple[int, One]]] = {}
    for place, item in enumerate(items):
        groups.setdefault(key(item), []).append((place, item))
    return list(groups.values())


def _is_drawable(found: PictureResult) -> bool:
    sources = [it.source for it in found.results]
    return all(isinstance(it, ImageExplanation) and isinstance(it.images[0], Tensor) for it in sources)


def _find_form(result: MapResult) -> object:
    source = cast(ImageExplanation, result.source)
    return source.images[0].shape, source.heatmaps.shape[2:], source.regions[0], source.evidence


def _count_bytes(result: MapResult) -> int:
    return cast(Tensor, result.source.images[0]).numel()


def _to_pixels(picture: Tensor) -> Pixels:
    """(3,H,W) as an array (H,W,3)."""
    return np.ascontiguousarray(to_numpy(picture.permute(1, 2, 0)))


def _let_go(found: PictureResult, drawn: Sequence[Drawn] | None) -> PictureResult:
    """The same without anything on the device; of pictures that are drawn their sizes are all that is needed."""
    if drawn is None:
        maps = {key: _fetch(each) for key, each in found.maps.items()}
        others = [replace(each, images=[*map(to_numpy, each.images)]) for each in found.attributions]
        return replace(found, maps=maps, attributions=others)
    shape = np.broadcast_to(np.uint8(0), tuple(found.picture.shape))
    maps = {key: replace(each, images=[shape], heatmaps=NONE) for key, each in found.maps.items()}
    sources = {id(each): maps[key] for key, each in found.maps.items()}
    made = [replace(it, source=sources[id(it.source)], drawn=own) for it, own in zip(found.results, drawn)]
    return replace(found, maps=maps, made=made)


def _fetch(source: ImageExplanation) -> ImageExplanation:
    pictures = [np.ascontiguousarray(to_numpy(picture)) for picture in source.images]
    return replace(source, images=pictures, heatmaps=source.heatmaps.cpu())
