"""JPEG files on a device: which of them its decoder is given, and the libraries that decode and encode there."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from gradcam.images.read import ORIENTATION

START, END = b"\xff\xd8", b"\xff\xd9"
SCAN, EXIF, ADOBE = 0xDA, 0xE1, 0xEE  # markers
XMP, XMP_TURN = b"http://ns.adobe.com/xap/1.0/\0", re.compile(rb'tiff:Orientation(?:="|>)[02-9]')
SEQUENTIAL = (0xC0, 0xC1)  # frames that are coded by Huffman, and not progressively
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
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
    all else (progressive, arithmetic-coded, of 12 bits, CMYK, RGB, cut off, another format, turned by XMP, or by EXIF data
    in several pieces), which the processor reads."""
    try:
        return _read_header(data)
    except IndexError:  # it ends within its header
        return None


def _read_header(data: bytes) -> Header | None:
    if data[:2] != START:
        return None
    place, frame, turn, is_usual = 2, b"", 0, True
    while True:
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:  # filling
            place += 1
            continue
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        segment = data[place + 4 : place + 2 + length]
        if length < 2 or len(segment) != length - 2:
            return None
        if marker == SCAN:
            # Within what is coded, 0xFF is followed by a zero or a restart: the first end is that of the picture.
            is_whole = bool(frame) and segment[0] == frame[5] and data.find(END, place + 2 + length) >= 0
            return _to_header(frame, turn or 1) if is_whole and is_usual else None
        if marker in FRAMES:
            if marker not in SEQUENTIAL or frame:
                return None
            frame = segment
        elif marker == EXIF and segment.startswith(b"Exif\0\0"):
            is_usual, turn = is_usual and not turn, _find_turn(segment)
        elif marker == EXIF and segment.startswith(XMP):
            is_usual = is_usual and XMP_TURN.search(segment) is None
        elif marker == ADOBE and segment.startswith(b"Adobe"):
            # Converted to YCbCr; of one channel that says nothing, and it is rare.
            is_usual = is_usual and segment[11] == 1
        place += 2 + length


def _to_header(frame: bytes, turn: int) -> Header | None:
    depth, channels = frame[0], frame[5]
    height, width = (int.from_bytes(frame[place : place + 2], "big") for place in (1, 3))
    each = [frame[6 + 3 * i : 9 + 3 * i] for i in range(channels)]
    samplings = [(one[1] >> 4, one[1] & 15) for one in each]
    is_known = channels == 1 or (samplings[0] in SAMPLINGS and all(it == (1, 1) for it in samplings[1:]))
    is_rgb = [one[0] for one in each] == [*b"RGB"]
    if depth != 8 or channels not in (1, 3) or not is_known or is_rgb or 0 in (height, width):
        return None
    return Header(height, width, channels == 1, turn)


def _find_turn(segment: bytes) -> int:
    exif = Image.Exif()
    try:
        exif.load(segment)
        turn = exif.get(ORIENTATION, 1)
    except Exception:  # whatever broken EXIF data raises, as in `images.read`
        return 1
    return turn if turn in range(1, 9) else 1


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
