"""From an item to a picture that the model can take: read, decoded, preprocessed, in whichever thread."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradcam.errors import GradcamError, ImageError, StoreError, describe_failure, printable
from gradcam.hooks.memory import is_out_of_memory
from gradcam.images.files import hash_file
from gradcam.images.jpeg import Header, read_header
from gradcam.images.read import check_memory
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared, Reading, read_bytes, read_picture
from gradcam.sources.contents import GivenContent, Item

Upload = Callable[[Tensor], Tensor]


def find_upload(device: torch.device) -> Upload | None:
    """A function for threads that brings a picture's tensor to the device; None where that has nothing to gain."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # which runs beside the computation's

    def upload(image: Tensor) -> Tensor:
        """The tensor on the device, wholly there; the same one where the device, or pinned memory, has no room now."""
        if image.device.type != "cpu":
            return image
        try:
            with torch.cuda.stream(stream):
                uploaded = image.pin_memory().to(device, non_blocking=True)
                stream.synchronize()  # only the calling thread waits
                return uploaded
        except RuntimeError as error:  # of the pinned memory, which is the machine's, there is no kind of its own
            if not is_out_of_memory(error):
                raise
            return image

    return upload


def receive(picture: Prepared, device: torch.device) -> Prepared:
    """An uploaded picture for the stream that computes; one that had no room is brought to the device now."""
    if device.type != "cuda":
        return picture
    if picture.image.device.type == "cuda":
        # Otherwise its memory could be given to the next upload while this stream has yet to read it.
        picture.image.record_stream(torch.cuda.current_stream(picture.image.device))
        return picture
    return replace(picture, image=picture.image.to(device))


@dataclass(frozen=True)
class Fetched:
    """An item, and the SHA-256 of the bytes that were read of it, where that is asked for and could be had."""

    item: Item
    sha256: str | None = None


@dataclass(frozen=True, eq=False)
class Waiting:
    """A picture that a device is to prepare: `data`, a JPEG with its header, or what was decoded, uint8 RGB (H,W,3)."""

    name: str
    data: bytes | Reading = field(repr=False)
    header: Header | None = None

    @property
    def size(self) -> int:
        """The bytes of its pixels."""
        if isinstance(self.data, Reading):
            return self.data.picture.nbytes
        return 0 if self.header is None else 3 * self.header.height * self.header.width


@dataclass(frozen=True, eq=False)
class Read:
    """What became of reading an item: a picture for the model, or the reason why there is none. `wanted`: the index of
    the class that the item asks for. `waiting`: what the device is to make a picture of."""

    fetched: Fetched
    picture: Prepared | GradcamError
    wanted: int | None = None
    waiting: Waiting | None = None


NOT_HERE = GradcamError("The image is not loaded.")  # in its place


def wait(name: str, data: bytes | Reading) -> Waiting | None:
    """A picture that a device can prepare; None for all others."""
    if isinstance(data, Reading):
        is_plain = data.values.dtype == np.uint8 and data.values.shape[2:] == (3,)
        return Waiting(name, data) if is_plain else None
    header = read_header(data)
    if header is not None:
        with contextlib.suppress(ImageError):  # one that is too large; who reads it says so
            check_memory(header.width, header.height, 6)
            return Waiting(name, data, header)
    return None


def read_item(
    classifier: Classifier, item: Item, *, audit: bool = False, upload: Upload | None = None, waits: bool = False
) -> Read:
    """Read and preprocess one picture; where it `waits`, only as far as a device cannot do that. Whatever goes wrong
    with it is in what comes back, in a line that names it. Raises `StoreError` where its store is the reason, which
    other pictures would meet as well."""
    fetched = Fetched(item)
    try:
        wanted = None if item.wanted is None else classifier.find_class(item.wanted)
        if isinstance(item.content, GivenContent):
            prepared = classifier.prepare(item.content.picture)
            if audit:
                fetched = Fetched(item, hashlib.sha256(prepared.reading.values.tobytes()).hexdigest())
        elif classifier.reader is read_picture or item.content.path is None:
            content = item.content.read()
            if audit:
                fetched = Fetched(item, hashlib.sha256(content).hexdigest())
            if waits and (waiting := wait(item.name, content)) is not None:
                return Read(fetched, NOT_HERE, wanted, waiting)
            reading = _blaming(item.name, Path(item.name), partial(read_bytes, data=content, reader=classifier.reader))
            if waits and (waiting := wait(item.name, reading)) is not None:
                return Read(fetched, NOT_HERE, wanted, waiting)
            prepared = classifier.prepare(reading)
        else:  # a reader of the user's reads files
            path = item.content.path
            before, digest = _look_at(path, hashes=audit)
            fetched = Fetched(item, digest)
            reading = _blaming(item.name, path, classifier.reader)
            if _look_at(path)[0] != before:
                raise ImageError("changed while it was read: try again when it is complete")
            prepared = classifier.prepare(reading)
        return Read(fetched, prepared if upload is None else replace(prepared, image=upload(prepared.image)), wanted)
    except StoreError:
        raise
    except (Exception, SystemExit) as error:  # a reader of the user's may raise anything
        return Read(fetched, fail(item.name, error))


def prepare_here(classifier: Classifier, waiting: Waiting) -> Prepared | GradcamError:
    """What `read_item` makes of it where nothing waits."""
    try:
        if isinstance(waiting.data, Reading):
            return classifier.prepare(waiting.data)
        decode = partial(read_bytes, data=waiting.data, reader=classifier.reader)
        return classifier.prepare(_blaming(waiting.name, Path(waiting.name), decode))
    except Exception as error:
        return fail(waiting.name, error)


def fail(name: str, error: BaseException) -> ImageError:
    """Why a picture cannot be read. A new error: one that was raised would keep all that its traceback refers to."""
    if isinstance(error, MemoryError):
        return ImageError(f"{name}: does not fit into memory")
    return ImageError(describe_failure(name, error))


def _look_at(path: Path, *, hashes: bool = False) -> tuple[tuple[int, ...], str | None]:
    """What tells two states of a file apart, and its SHA-256 where that is asked for."""
    try:
        found = path.stat()
        state = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        return state, hash_file(path) if hashes else None
    except OSError as error:
        raise ImageError(f"cannot be opened ({error.strerror})") from error


def _blaming(name: str, path: Path, reader: Callable[[Path], Reading]) -> Reading:
    """What the reader gives; its error is of the item, wherever the file that it read is."""
    try:
        return reader(path)
    except GradcamError as error:
        shown = printable(str(path))
        text = str(error).removeprefix(f"{shown}: ")
        raise ImageError(text.replace(shown, name) if path.is_absolute() else text) from error
