"""Read, decode and preprocess an input image for the model. All functions are thread-safe."""

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

from gradcam.errors import GradcamError, ImageError, StoreError, describe_failure, escape_controls
from gradcam.hooks.memory import is_out_of_memory
from gradcam.images.files import hash_file
from gradcam.images.jpeg import JpegHeader, read_header
from gradcam.images.read import check_memory
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared, Reading, read_bytes, read_image_file
from gradcam.sources.contents import InMemoryImage, InputImage

Upload = Callable[[Tensor], Tensor]


def find_upload(device: torch.device) -> Upload | None:
    """Return a thread-safe function that copies an image tensor to a CUDA device, or None for other devices."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # Copies run on this stream, in parallel with the model.

    def upload(image: Tensor) -> Tensor:
        """Return a copy on the device, or the tensor itself if device memory or pinned memory is full."""
        if image.device.type != "cpu":
            return image
        try:
            with torch.cuda.stream(stream):
                uploaded = image.pin_memory().to(device, non_blocking=True)
                stream.synchronize()  # Only the calling thread waits.
                return uploaded
        except RuntimeError as error:  # PyTorch has no specific exception type for a lack of pinned memory.
            if not is_out_of_memory(error):
                raise
            return image

    return upload


def receive(prepared: Prepared, device: torch.device) -> Prepared:
    """Make an uploaded image safe to use on the current stream. If the image is still on the CPU, upload it now."""
    if device.type != "cuda":
        return prepared
    if prepared.image.device.type == "cuda":
        # Without this call, PyTorch could reuse the image's memory before the current stream has read the image.
        prepared.image.record_stream(torch.cuda.current_stream(prepared.image.device))
        return prepared
    return replace(prepared, image=prepared.image.to(device))


@dataclass(frozen=True)
class HashedItem:
    """An input image, and the SHA-256 of its bytes (None if the hash was not requested or cannot be computed)."""

    item: InputImage
    sha256: str | None = None


@dataclass(frozen=True, eq=False)
class PendingImage:
    """An image that the device has yet to preprocess.

    `data` is the content of a JPEG file, whose header is `header`. If the CPU has already decoded the image, `data`
    holds the pixels, uint8 RGB (H,W,3), and `header` is None.
    """

    name: str
    data: bytes | Reading = field(repr=False)
    header: JpegHeader | None = None

    @property
    def size(self) -> int:
        """Return the number of bytes of the decoded image."""
        if isinstance(self.data, Reading):
            return self.data.picture.nbytes
        return 0 if self.header is None else 3 * self.header.height * self.header.width


@dataclass(frozen=True, eq=False)
class ReadItem:
    """The outcome of reading an item: an image for the model, or an error.

    `wanted` is the index of the class that the item requests. If the device has yet to preprocess the image, `pending`
    holds the image, and `picture` is `IMAGE_NOT_LOADED`.
    """

    fetched: HashedItem
    picture: Prepared | GradcamError
    wanted: int | None = None
    pending: PendingImage | None = None


IMAGE_NOT_LOADED = GradcamError("The image is not loaded.")  # A placeholder for an image that is not in memory.


def to_pending(name: str, data: bytes | Reading) -> PendingImage | None:
    """Return an image that the device can prepare, or None if only the CPU can."""
    if isinstance(data, Reading):
        is_plain = data.values.dtype == np.uint8 and data.values.shape[2:] == (3,)
        return PendingImage(name, data) if is_plain else None
    header = read_header(data)
    if header is not None:
        # `check_memory` raises an error for images that are too large. The CPU then raises the same error again.
        with contextlib.suppress(ImageError):
            check_memory(header.width, header.height, 6)
            return PendingImage(name, data, header)
    return None


def read_item(
    classifier: Classifier, item: InputImage, *, audit: bool = False, upload: Upload | None = None, waits: bool = False
) -> ReadItem:
    """Read and preprocess one image. If `waits` is True, leave the steps that a device supports to the device.

    If the image cannot be read, the returned item holds an error with a one-line message that names the image. Raises
    `StoreError` if an object store fails, because the failure affects other images as well.
    """
    fetched = HashedItem(item)
    try:
        class_index = None if item.wanted is None else classifier.find_class(item.wanted)
        if isinstance(item.content, InMemoryImage):
            prepared = classifier.prepare(item.content.picture)
            if audit:
                fetched = HashedItem(item, hashlib.sha256(prepared.reading.values.tobytes()).hexdigest())
        elif classifier.reader is read_image_file or item.content.path is None:
            content = item.content.read()
            if audit:
                fetched = HashedItem(item, hashlib.sha256(content).hexdigest())
            if waits and (pending := to_pending(item.name, content)) is not None:
                return ReadItem(fetched, IMAGE_NOT_LOADED, class_index, pending)
            reading = _decode(classifier, item.name, content)
            if waits and (pending := to_pending(item.name, reading)) is not None:
                return ReadItem(fetched, IMAGE_NOT_LOADED, class_index, pending)
            prepared = classifier.prepare(reading)
        else:  # A user-defined reader takes a path.
            path = item.content.path
            state_before, digest = _read_file_state(path, hashes=audit)
            fetched = HashedItem(item, digest)
            reading = _read_with_item_name(item.name, path, classifier.reader)
            if _read_file_state(path)[0] != state_before:
                raise ImageError("changed while it was read: try again when the file is complete")
            prepared = classifier.prepare(reading)
        if upload is not None:
            prepared = replace(prepared, image=upload(prepared.image))
        return ReadItem(fetched, prepared, class_index)
    except StoreError:
        raise
    except (Exception, SystemExit) as error:  # A user-defined reader may raise any exception.
        return ReadItem(fetched, to_image_error(item.name, error))


def prepare_on_cpu(classifier: Classifier, pending: PendingImage) -> Prepared | GradcamError:
    """Prepare a pending image on the CPU, as `read_item` does if `waits` is False."""
    try:
        data = pending.data
        return classifier.prepare(data if isinstance(data, Reading) else _decode(classifier, pending.name, data))
    except Exception as error:
        return to_image_error(pending.name, error)


def to_image_error(name: str, error: BaseException) -> ImageError:
    """Return a new error that names the image, because the traceback of `error` would keep tensors alive."""
    if isinstance(error, MemoryError):
        return ImageError(f"{name}: does not fit into memory")
    return ImageError(describe_failure(name, error))


def _read_file_state(path: Path, *, hashes: bool = False) -> tuple[tuple[int, ...], str | None]:
    """Return values that change when the file changes, and the file's SHA-256 (None if `hashes` is False)."""
    try:
        status = path.stat()
        state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return state, hash_file(path) if hashes else None
    except OSError as error:
        raise ImageError(f"cannot be opened ({error.strerror})") from error


def _decode(classifier: Classifier, name: str, data: bytes) -> Reading:
    return _read_with_item_name(name, Path(name), partial(read_bytes, data=data, reader=classifier.reader))


def _read_with_item_name(name: str, path: Path, reader: Callable[[Path], Reading]) -> Reading:
    """Call the reader. If the reader raises an error, replace the path in its message by the item's name."""
    try:
        return reader(path)
    except GradcamError as error:
        path_text = escape_controls(str(path))
        text = str(error).removeprefix(f"{path_text}: ")
        raise ImageError(text.replace(path_text, name) if path.is_absolute() else text) from error
