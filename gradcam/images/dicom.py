"""Read DICOM files with pydicom, and apply the display window that each file defines."""

from __future__ import annotations

import contextlib
import os
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import ImageError, shorten, to_pip_command
from gradcam.images import read
from gradcam.images.read import Spacing, find_size, in_strips, is_spacing

if TYPE_CHECKING:
    from pydicom import Dataset

PIXEL_ATTRIBUTES = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")

Floats = NDArray[np.float64]


def read_dicom(
    path: str | os.PathLike[str], data: bytes | None = None
) -> tuple[NDArray[Any], str | None, Spacing | None]:
    """Return the first frame of a DICOM file, as float32 (H,W) in [0,1] or RGB uint8 (H,W,3), a note and the spacing.

    The note reports further frames, or a missing or unusable window. The spacing is that of `_find_spacing`. `data` is
    the file's content, if the caller has already read the file. Grey values are first rescaled by the modality's slope
    and intercept, or by the modality LUT. Then the VOI LUT is applied or, if there is none, the first window (PS3.3
    C.11.2). If a file has neither a VOI LUT nor a window, the full range of its values is mapped to [0,1]. White is 1,
    also in MONOCHROME1.

    Raises `ImageError`, which names the file, if the image is incomplete or unreadable, or if pydicom or a plugin is
    missing.
    """
    path = read.to_path(path)
    with read.translate_read_errors(path), read.open_content(path, data) as file:
        dataset = _open(file)
        frames = int(dataset.get("NumberOfFrames") or 1)
        frame_note = f"the first of {frames} frames" if frames > 1 else None
        bytes_per_pixel = int(dataset.get("SamplesPerPixel") or 1) * int(dataset.get("BitsAllocated") or 1) / 8
        size = int(dataset.get("Columns") or 0), int(dataset.get("Rows") or 0)
        read.check_memory(*size, 3 * bytes_per_pixel + 12, find_size(file))
        stored = _decode(dataset)
        if stored.ndim == 3 or dataset.PhotometricInterpretation == "PALETTE COLOR":
            return _to_rgb(stored, dataset), frame_note, _find_spacing(dataset)
        grey, window_note = _to_grey(stored, dataset)
        return grey, "; ".join(filter(None, (frame_note, window_note))) or None, _find_spacing(dataset)


def _open(file: BinaryIO) -> Dataset:
    try:
        from pydicom import dcmread
        from pydicom.errors import InvalidDicomError
        from pydicom.pixels import utils  # noqa: F401 (new in pydicom 3)
    except ImportError:
        raise ImageError(f"is a DICOM file, which needs pydicom 3: {to_pip_command('dicom')}") from None
    try:
        _check_unpacked_size(file)
        dataset = dcmread(file)
    except InvalidDicomError:
        raise ImageError(f"is not a DICOM file: there is no '{read.DICOM_MAGIC.decode()}' at byte 128") from None
    if not any(name in dataset for name in PIXEL_ATTRIBUTES):
        raise ImageError("contains no image, or is cut off: there is no Pixel Data")
    return dataset


def _check_unpacked_size(file: BinaryIO) -> None:
    """Raise `ImageError` if the unpacked file needs too much memory. pydicom always unpacks the whole file."""
    from pydicom.filereader import _read_file_meta_info, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    size = find_size(file)
    read_preamble(file, force=False)
    if _read_file_meta_info(file).get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        packed = file.read(2**16)
        while packed and size <= read.MEMORY_BUDGET_BYTES:
            size += len(unpacker.decompress(packed, 2**20))
            packed = unpacker.unconsumed_tail or file.read(2**16)
    file.seek(0)
    read.check_memory(0, 0, 0, size)


def _decode(dataset: Dataset) -> NDArray[Any]:
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.pixels.utils import pixel_array

    syntax = dataset.file_meta.TransferSyntaxUID
    plugin = "pip install 'pylibjpeg[all]'"
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise ImageError(f"is compressed as {syntax.name}, which pydicom cannot decode") from None
    if not decoder.is_available:
        raise ImageError(f"is compressed as {syntax.name}, for which pydicom needs a plugin: {plugin}")
    try:
        return pixel_array(dataset, index=0)
    except Exception as error:
        if not syntax.is_compressed:
            raise
        reason = f"{plugin} ({' '.join(str(error).split())})"
        problem = f"is damaged or cut off, or no installed plugin can decode its {syntax.name}"
        raise ImageError(f"{problem}: try {reason}") from error


def _to_rgb(stored: NDArray[Any], dataset: Dataset) -> NDArray[np.uint8]:
    from pydicom.pixels.processing import apply_color_lut

    maximum = 2**dataset.BitsStored - 1
    if dataset.PhotometricInterpretation == "PALETTE COLOR":
        stored = apply_color_lut(stored, dataset)
        maximum = np.iinfo(stored.dtype).max
    colours = np.empty((*stored.shape[:2], 3), np.uint8)
    for rows in in_strips(*stored.shape[:2]):
        colours[rows] = np.clip(np.rint(stored[rows, :, :3] * (255 / maximum)), 0, 255)
    return colours


def _to_grey(stored: NDArray[Any], dataset: Dataset) -> tuple[NDArray[np.float32], str | None]:
    from pydicom.pixels.processing import apply_modality_lut

    transformation = _find_settings(dataset, "PixelValueTransformationSequence")
    voi = _find_settings(dataset, "FrameVOILUTSequence")
    center, width = _get_first(voi.get("WindowCenter")), _get_first(voi.get("WindowWidth"))
    function, note = str(voi.get("VOILUTFunction") or "LINEAR"), None

    def rescale(rows: slice) -> Floats:
        return apply_modality_lut(stored[rows], transformation).astype(np.float64)

    if voi.get("VOILUTSequence"):
        order = "<" if dataset.file_meta.TransferSyntaxUID.is_little_endian else ">"
        to_grey = partial(_apply_lut, table=voi.VOILUTSequence[0], order=order)
    elif center is not None and width is not None and width >= (1 if function == "LINEAR" else 1e-9):
        to_grey = partial(apply_window, center=center, width=width, function=function)
    else:
        finite = (strip[np.isfinite(strip)] for strip in map(rescale, in_strips(*stored.shape)))
        limits = [(strip.min().item(), strip.max().item()) for strip in finite if strip.size] or [(0.0, 0.0)]
        low, high = min(minimum for minimum, _ in limits), max(maximum for _, maximum in limits)
        to_grey = partial(_apply_range, low=low, high=high)
        note = f"the file has no usable window: using the full range of values, {low:.6g} to {high:.6g}"
    grey = np.empty(stored.shape, np.float32)
    for rows in in_strips(*stored.shape):
        strip = to_grey(rescale(rows))
        grey[rows] = 1 - strip if dataset.PhotometricInterpretation == "MONOCHROME1" else strip
    return grey, note


def apply_window(values: Floats, center: float, width: float, function: str) -> Floats:
    """Map values through a window to [0,1] (PS3.3 C.11.2.1.2 and C.11.2.1.3).

    `function` is LINEAR, LINEAR_EXACT or SIGMOID.
    """
    if function == "SIGMOID":
        # The sigmoid 1 / (1 + exp(-4 (values - center) / width)), in a form that cannot overflow.
        return 0.5 + 0.5 * np.tanh(2 * (values - center) / width)
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    elif function != "LINEAR_EXACT":
        raise ImageError(f"has the window function {shorten(function)}, expected LINEAR, LINEAR_EXACT or SIGMOID")
    return np.clip((values - center) / width + 0.5, 0, 1) if width else (values > center).astype(np.float64)


def _apply_lut(values: Floats, table: Dataset, order: str) -> Floats:
    """Map values through a VOI LUT (PS3.3 C.11.2.1.1). `order` is the byte order of the LUT's entries.

    Values below the table get its first entry, and values above the table get its last entry.
    """
    count, first, bits = (int(number) for number in table.LUTDescriptor)
    data = table.LUTData
    if isinstance(data, bytes):
        data = np.frombuffer(data, np.uint8 if len(data) == count else f"{order}u2")
    entries = np.asarray(data)[: count or 2**16] / (2**bits - 1)
    return entries[np.clip(values - first, 0, len(entries) - 1).astype(np.int64)]


def _apply_range(values: Floats, low: float, high: float) -> Floats:
    return (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / (high - low or 1)


def _find_settings(dataset: Dataset, name: str) -> Dataset:
    """Return the data set that contains the first frame's settings of the functional group `name`.

    If the file has no such group, return `dataset` itself, which contains the settings of single-frame files.
    """
    for group_name in ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence"):
        groups = dataset.get(group_name)
        if groups and groups[0].get(name):
            return groups[0][name].value[0]
    return dataset


def _find_spacing(dataset: Dataset) -> Spacing | None:
    """Return the height and width of a pixel in mm within the patient, or None.

    In projection radiography, the spacing may be the spacing at the detector, without a correction for magnification
    (PS3.3 10.7.1.3). Such a spacing does not measure the patient, so the result is None.
    """
    spacing = _find_settings(dataset, "PixelMeasuresSequence").get("PixelSpacing")
    with contextlib.suppress(TypeError, ValueError):  # A damaged value must not make the image unreadable.
        pair: Any = tuple(map(float, spacing))
        return pair if is_spacing(pair) and spacing != dataset.get("ImagerPixelSpacing") else None
    return None


def _get_first(value: Any) -> float | None:
    if value is None or isinstance(value, (str, float, int)):
        return None if value in (None, "") else float(value)
    return float(value[0]) if len(value) else None
