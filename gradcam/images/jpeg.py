"""Decode and encode JPEG files on a device, with torchcodec or torchvision."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import JpegImagePlugin
from torch import Tensor

from gradcam.images.read import find_orientation

END_MARKER = b"\xff\xd9"
EXIF_SIGNATURE, XMP_ORIENTATION = b"Exif\0\0", re.compile(rb'tiff:Orientation(?:="|>)[02-9]')
# The supported sampling factors (horizontal, vertical) of the first channel. Other channels must have (1, 1).
SAMPLINGS = {(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2)}


@dataclass(frozen=True)
class JpegHeader:
    """The header of a JPEG file.

    `height` and `width` are the sides of the stored image, to which the EXIF orientation `turn` is not applied.
    """

    height: int
    width: int
    is_grey: bool
    turn: int


def read_header(data: bytes) -> JpegHeader | None:
    """Return the header of a JPEG file if a device can decode the file, otherwise None.

    A device can decode complete, sequential JPEG files of 8 bits, in grey or YCbCr. The result is None for all other
    files, and for files whose orientation is in XMP or in several EXIF segments.
    """
    file = io.BytesIO(data)
    try:
        image = JpegImagePlugin.JpegImageFile(file)
    except Exception:  # For broken headers, Pillow raises errors of many types.
        return None
    # Pillow has read the file up to the end of the first scan's header, in which the number of channels is stored. The
    # compressed data starts at the current position.
    start = file.tell()
    # In compressed data, each 0xFF is followed by a zero byte or belongs to a restart marker. The first end marker is
    # therefore the end of the image.
    has_end = data[start - 2 * image.layers - 4] == image.layers and data.find(END_MARKER, start) >= 0
    names, (first, *further) = [sampling[0] for sampling in image.layer], [sampling[1:3] for sampling in image.layer]
    is_supported_sampling = image.layers == 1 or (first in SAMPLINGS and set(further) <= {(1, 1)})
    # Adobe's marker states whether the channels are YCbCr. In grey files, the marker has no meaning. Still, grey files
    # with the marker are left to the CPU, because they are too rare for a special case.
    is_ycbcr = image.info.get("adobe_transform", 1) == 1 and names != [*b"RGB"]
    is_sequential = image.layers == len(image.layer) and image.layers in (1, 3) and "progressive" not in image.info
    has_usual_orientation = data.count(EXIF_SIGNATURE, 0, start) <= 1 and not XMP_ORIENTATION.search(data, 0, start)
    if not (is_sequential and has_end and is_supported_sampling and is_ycbcr and has_usual_orientation):
        return None
    return JpegHeader(image.height, image.width, image.layers == 1, find_orientation(image))


@dataclass(frozen=True)
class Codec:
    """A library that decodes and encodes JPEG on a device.

    `decode(files, is_grey)` takes the bytes of files as uint8 tensors on the CPU, all grey or all in colour. The result
    is RGB images, uint8 (3,H,W), on the device. `turns` is True if `decode` rotates images by the EXIF orientation.
    `encode(images, quality)` returns the bytes of files. Both functions wait for earlier work on the current stream,
    and return finished results. While a function runs, no other work may be started on the stream.
    """

    name: str
    turns: bool
    decode: Callable[[Sequence[Tensor], bool], list[Tensor]]
    encode: Callable[[Sequence[Tensor], int], list[bytes]]


@functools.cache
def find_codec(device: torch.device) -> Codec | None:
    """Return the codec of the first library that works on the device, or None if neither library works.

    torchcodec is tried first, because torchcodec's decoders will replace torchvision's.
    """
    if device.type not in ("cpu", "cuda"):
        return None
    backend = "libjpeg" if device.type == "cpu" else "nvJPEG"
    for name, make_codec in {"torchcodec": _make_torchcodec, "torchvision": _make_torchvision}.items():
        # Ignore errors of any type: a library may be missing, or the driver may lack nvJPEG.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codec = make_codec(f"{name} {backend}", device)
            (file,) = codec.encode([torch.full((3, 16, 16), 99, dtype=torch.uint8, device=device)], 90)
            (image,) = codec.decode([to_tensor(file)], False)
            if image.shape == (3, 16, 16) and image.device.type == device.type:
                return codec
    return None


def to_tensor(data: bytes) -> Tensor:
    """Return the bytes of a file as a uint8 tensor on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _make_torchcodec(name: str, device: torch.device) -> Codec:
    from torchcodec.decoders import decode_jpeg
    from torchcodec.encoders import JpegEncoder

    def decode(files: Sequence[Tensor], is_grey: bool) -> list[Tensor]:
        # torchcodec before 0.17 does not wait for the current stream (meta-pytorch/torchcodec 1634).
        _wait_for_current(device)
        images = decode_jpeg(list(files), mode="GRAY" if is_grey else "RGB", device=device)
        return [image.expand(3, -1, -1) for image in images]

    def encode(images: Sequence[Tensor], quality: int) -> list[bytes]:
        return _to_bytes([JpegEncoder(image).to_tensor(quality=quality) for image in images])

    return Codec(name, True, decode, encode)


# torchvision uses its own CUDA streams. The decoder may write into memory that earlier work on the current stream still
# uses (pytorch/vision 9606). The encoder may start before the images are computed. The encoder may also return before
# its last copy, on the default stream, is finished.
def _make_torchvision(name: str, device: torch.device) -> Codec:
    from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

    def decode(files: Sequence[Tensor], is_grey: bool) -> list[Tensor]:
        _wait_for_current(device)
        images = decode_jpeg(list(files), ImageReadMode.GRAY if is_grey else ImageReadMode.RGB, device)
        return [image.expand(3, -1, -1) for image in images]

    def encode(images: Sequence[Tensor], quality: int) -> list[bytes]:
        _wait_for_current(device)
        files = encode_jpeg(list(images), quality)
        if device.type == "cuda":
            torch.cuda.default_stream(device).synchronize()
        return _to_bytes(files)

    return Codec(name, False, decode, encode)


def _wait_for_current(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _to_bytes(files: Sequence[Tensor]) -> list[bytes]:
    """Copy all files to the CPU in one transfer, and split the data into files."""
    return [data.numpy().tobytes() for data in torch.cat(list(files)).cpu().split([len(file) for file in files])]
