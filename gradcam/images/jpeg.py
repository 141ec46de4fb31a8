"""JPEG files on a device: which of them its decoder is given, and the libraries that decode and encode there."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import JpegImagePlugin
from torch import Tensor

from gradcam.images.read import find_turn

END = b"\xff\xd9"
EXIF, XMP_TURN = b"Exif\0\0", re.compile(rb'tiff:Orientation(?:="|>)[02-9]')
# Of the first channel, (across, down), where each other has one sample.
SAMPLINGS = {(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2)}


@dataclass(frozen=True)
class Header:
    """What a file says of itself. `height`, `width`: as it lies, before `turn` of its EXIF data, 1 to 8, is applied."""

    height: int
    width: int
    is_grey: bool
    turn: int


def read_header(data: bytes) -> Header | None:
    """The header of a JPEG that a device can decode: of 8 bits, grey or YCbCr, sequential, and with an end. None for
    all else (progressive, of 12 bits, CMYK, RGB, cut off, another format, turned by XMP, or by EXIF data in several
    pieces), which the processor reads."""
    file = io.BytesIO(data)
    try:
        image = JpegImagePlugin.JpegImageFile(file)
    except Exception:  # whatever Pillow raises of a broken header
        return None
    start = file.tell()  # of what is coded; the first scan's header ends there, and says how many channels it has
    # Within what is coded, 0xFF is followed by a zero or a restart: the first end is that of the picture.
    is_whole = data[start - 2 * image.layers - 4] == image.layers and data.find(END, start) >= 0
    names, (first, *others) = [one[0] for one in image.layer], [one[1:3] for one in image.layer]
    is_known = image.layers == 1 or (first in SAMPLINGS and all(one == (1, 1) for one in others))
    # Converted to YCbCr; of one channel that says nothing, and it is rare.
    is_converted = image.info.get("adobe_transform", 1) == 1 and names != [*b"RGB"]
    is_turned_oddly = data.count(EXIF, 0, start) > 1 or XMP_TURN.search(data, 0, start) is not None
    is_usual = image.layers == len(image.layer) and image.layers in (1, 3) and "progressive" not in image.info
    if not (is_usual and is_whole and is_known and is_converted) or is_turned_oddly:
        return None
    return Header(image.height, image.width, image.layers == 1, find_turn(image))


@dataclass(frozen=True)
class Codec:
    """A library that decodes and encodes JPEG on a device. `decode(files, is_grey)`: files of one kind, uint8 on the
    processor, to RGB, uint8 (3,H,W) there; `turns`: whether it heeds their EXIF data. `encode(pictures, quality)`: such
    pictures to files. Work that was begun on the current stream is waited for, and what they give is whole; nothing else
    may begin there meanwhile."""

    name: str
    turns: bool
    decode: Callable[[Sequence[Tensor], bool], list[Tensor]]
    encode: Callable[[Sequence[Tensor], int], list[bytes]]


@functools.cache
def find_codec(device: torch.device) -> Codec | None:
    """What works on the device, tried out; None where nothing does. torchcodec first, whose decoders torchvision's are
    to make way for."""
    if device.type not in ("cpu", "cuda"):
        return None
    backend = "libjpeg" if device.type == "cpu" else "nvJPEG"
    for name, make in {"torchcodec": _make_torchcodec, "torchvision": _make_torchvision}.items():
        # Whatever a library, or a driver without nvJPEG, raises: then this is not to be had here.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codec = make(f"{name} {backend}", device)
            (file,) = codec.encode([torch.full((3, 16, 16), 99, dtype=torch.uint8, device=device)], 90)
            (picture,) = codec.decode([to_tensor(file)], False)
            if picture.shape == (3, 16, 16) and picture.device.type == device.type:
                return codec
    return None


def to_tensor(data: bytes) -> Tensor:
    """A file as uint8 on the processor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _make_torchcodec(name: str, device: torch.device) -> Codec:
    from torchcodec.decoders import decode_jpeg
    from torchcodec.encoders import JpegEncoder

    def decode(files: Sequence[Tensor], is_grey: bool) -> list[Tensor]:
        _wait_for_current(device)  # which versions before 0.17 do not (meta-pytorch/torchcodec 1634)
        found = decode_jpeg(list(files), mode="GRAY" if is_grey else "RGB", device=device)
        return [_to_colours(one) for one in found]

    def encode(pictures: Sequence[Tensor], quality: int) -> list[bytes]:
        return _to_bytes([JpegEncoder(one).to_tensor(quality=quality) for one in pictures])

    return Codec(name, True, decode, encode)


# torchvision works on streams of its own. Its decoder does not wait for who used its results' memory before
# (pytorch/vision 9606), its encoder neither for who makes the pictures nor, on the default stream, for its last copy.
def _make_torchvision(name: str, device: torch.device) -> Codec:
    from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

    def decode(files: Sequence[Tensor], is_grey: bool) -> list[Tensor]:
        _wait_for_current(device)
        found = decode_jpeg(list(files), ImageReadMode.GRAY if is_grey else ImageReadMode.RGB, device)
        return [_to_colours(one) for one in found]

    def encode(pictures: Sequence[Tensor], quality: int) -> list[bytes]:
        _wait_for_current(device)
        files = encode_jpeg(list(pictures), quality)
        if device.type == "cuda":
            torch.cuda.default_stream(device).synchronize()
        return _to_bytes(files)

    return Codec(name, False, decode, encode)


def _wait_for_current(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _to_colours(picture: Tensor) -> Tensor:
    return picture.expand(3, -1, -1) if picture.shape[0] == 1 else picture


def _to_bytes(files: Sequence[Tensor]) -> list[bytes]:
    """All of them in one copy to the processor."""
    whole = torch.cat(list(files)).cpu().numpy()
    ends = list(itertools.accumulate(map(len, files)))
    return [whole[end - len(file) : end].tobytes() for end, file in zip(ends, files)]
