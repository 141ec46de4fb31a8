"""From an item to a picture that the model can take: read, decoded, preprocessed, in whichever thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gradcam.errors import GradcamError, ImageError, StoreError, describe_failure, printable
from gradcam.hooks.memory import is_out_of_memory
from gradcam.images.files import hash_file
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
class Read:
    """What became of reading an item: a picture for the model, or the reason why there is none. `wanted`: the index of
    the class that the item asks for."""

    fetched: Fetched
    picture: Prepared | GradcamError
    wanted: int | None = None


def read_item(classifier: Classifier, item: Item, *, audit: bool = False, upload: Upload | None = None) -> Read:
    """Read and preprocess one picture. Whatever goes wrong with it is in what comes back, in a line that names it.
    Raises `StoreError` where its store is the reason, which other pictures would meet as well."""
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
            decode = partial(read_bytes, data=content, reader=classifier.reader)
            prepared = classifier.prepare(_blaming(item.name, Path(item.name), decode))
        else:  # a reader of the user's reads files
            path = item.content.path
            before, digest = _look_at(path, hashes=audit)
            fetched = Fetched(item, digest)
            reading = _blaming(item.name, path, classifier.reader)
            if _look_at(path)[0] != before:
                raise ImageError("was changed while it was read: try again once it is whole")
            prepared = classifier.prepare(reading)
        return Read(fetched, prepared if upload is None else replace(prepared, image=upload(prepared.image)), wanted)
    except StoreError:
        raise
    except MemoryError:
        return Read(fetched, ImageError(f"{item.name}: does not fit into memory"))
    except (Exception, SystemExit) as error:  # a reader of the user's may raise anything
        # A new error: the one that was raised would keep all that its traceback refers to.
        return Read(fetched, ImageError(describe_failure(item.name, error)))


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
