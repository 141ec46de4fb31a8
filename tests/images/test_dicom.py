"""Test DICOM files written with pydicom, against windows computed by hand from PS3.3 C.11.2."""

from __future__ import annotations

import builtins
import math
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
from pydicom.uid import (
    MPEG2MPML,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    SecondaryCaptureImageStorage,
)

from gradcam.errors import ImageError
from gradcam.images.dicom import apply_window, read_dicom
from gradcam.images.read import is_dicom
from gradcam.models.preprocess import read_image_file

VALUES = np.array([[-200, -160, 0], [39, 40, 240]], np.int16)


def make(pixels: np.ndarray, *, syntax: str = ExplicitVRLittleEndian, **fields: Any) -> FileDataset:
    """Make a DICOM dataset from stored values (H,W) or colours (H,W,3)."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    dataset = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    dataset.SOPClassUID, dataset.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    rows = pixels.shape[1:3] if fields.get("NumberOfFrames") else pixels.shape[:2]
    dataset.Rows, dataset.Columns = rows
    is_colour = fields.get("PhotometricInterpretation", "").startswith(("RGB", "YBR"))
    dataset.SamplesPerPixel = 3 if is_colour else 1
    if is_colour:
        dataset.PlanarConfiguration = 0
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 8 * pixels.dtype.itemsize
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in fields.items():
        setattr(dataset, name, value)
    if syntax == ExplicitVRBigEndian:
        pixels = pixels.astype(pixels.dtype.newbyteorder(">"))
    dataset.PixelData = pixels.tobytes() + bytes(pixels.nbytes % 2)
    dataset["PixelData"].VR = "OB" if dataset.BitsAllocated == 8 else "OW"
    return dataset


def save(path: Path, dataset: FileDataset) -> Path:
    pydicom.dcmwrite(path, dataset, enforce_file_format=True)
    return path


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a DICOM file with these stored values."""
    return lambda pixels, **fields: save(tmp_path / "scan.dcm", make(pixels, **fields))


def window_slowly(value: float, center: float, width: float, function: str) -> float:
    """Apply the formulas of PS3.3 C.11.2.1.2.1, C.11.2.1.3.1 and C.11.2.1.3.2 as the standard writes them, from 0 to 1."""
    if function == "SIGMOID":
        return 1 / (1 + math.exp(min(700, -4 * (value - center) / width)))  # exp(710) overflows a float
    offset, steps = (0, width) if function == "LINEAR_EXACT" else (0.5, width - 1)
    if value <= center - offset - steps / 2:
        return 0
    if value > center - offset + steps / 2:
        return 1
    return (value - (center - offset)) / steps + 0.5


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("center", "width"), [(40, 400), (2048, 4096), (0, 1), (10.5, 2), (-600, 1500.5)])
def test_windows_equal_the_standards_formulas(function: str, center: float, width: float) -> None:
    values = np.concatenate([np.linspace(-1500, 5000, 500), center + np.linspace(-3, 3, 25)])
    expected = [window_slowly(value, center, width, function) for value in values]
    np.testing.assert_allclose(apply_window(values, center, width, function), expected, rtol=0, atol=1e-12)


def test_values_far_outside_a_sigmoid_are_black_and_white() -> None:
    np.testing.assert_array_equal(apply_window(np.array([-1e9, 1e9]), 0, 1, "SIGMOID"), [0, 1])


def test_a_window_is_worked_by_hand(write: Write) -> None:
    # From 40 - 0.5 - 199.5 = -160 to 40 - 0.5 + 199.5 = 239: 399 steps.
    path = write(VALUES, WindowCenter=40, WindowWidth=400)
    values, note, _ = read_dicom(path)
    assert note is None
    assert values.dtype == np.float32
    expected = [[0, 0, 160 / 399], [199 / 399, 200 / 399, 1]]
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-7)


def test_slope_and_intercept_come_before_the_window(write: Write) -> None:
    stored = np.array([[1024, 1064, 1164, 4000]], np.uint16)  # 0, 80, 280 and 5952 Hounsfield units
    fields = {"RescaleSlope": 2, "RescaleIntercept": -2048, "VOILUTFunction": "LINEAR_EXACT"}
    values, *_ = read_dicom(write(stored, WindowCenter=80, WindowWidth=400, **fields))
    np.testing.assert_allclose(values, [[0.3, 0.5, 1, 1]], rtol=0, atol=1e-7)


def test_a_modality_table_comes_before_the_window(write: Write) -> None:
    table = Dataset()
    table.LUTDescriptor, table.ModalityLUTType = [4, 0, 16], "US"
    table.add_new("LUTData", "US", [0, 100, 50, 200])
    fields = {"ModalityLUTSequence": [table], "VOILUTFunction": "LINEAR_EXACT"}
    values, *_ = read_dicom(write(np.array([[0, 1, 2, 3, 9]], np.uint16), WindowCenter=100, WindowWidth=200, **fields))
    np.testing.assert_allclose(values, [[0, 0.5, 0.25, 1, 1]], rtol=0, atol=1e-7)


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("center", "width"), [(40, 400), (1000, 3000)])
def test_windows_equal_pydicoms(write: Write, function: str, center: int, width: int) -> None:
    stored = np.random.default_rng(0).integers(0, 4096, (20, 30), dtype=np.uint16)
    fields = {"RescaleSlope": 1.5, "RescaleIntercept": -1024, "VOILUTFunction": function, "BitsStored": 12}
    path = write(stored, WindowCenter=center, WindowWidth=width, HighBit=11, **fields)
    dataset = pydicom.dcmread(path)
    theirs = apply_voi_lut(apply_modality_lut(dataset.pixel_array, dataset), dataset)
    low, high = -1024, 4095 * 1.5 - 1024  # the range of all values that could be stored, rescaled
    ours, *_ = read_dicom(path)
    np.testing.assert_allclose(ours, (theirs - low) / (high - low), rtol=0, atol=1e-6)


@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian])
def test_a_voi_table_goes_before_the_window(write: Write, as_bytes: bool, syntax: str) -> None:
    table = Dataset()
    entries = [0, 1023, 512, 4095]
    table.LUTDescriptor = [4, 10, 12]
    table.add_new("LUTData", "US", entries)
    if as_bytes:
        order = ">" if syntax == ExplicitVRBigEndian else "<"
        table.add_new("LUTData", "OW", struct.pack(f"{order}4H", *entries))
    stored = np.array([[0, 10, 11], [12, 13, 99]], np.uint16)
    path = write(stored, syntax=syntax, VOILUTSequence=[table], WindowCenter=5, WindowWidth=2)
    values, note, _ = read_dicom(path)
    expected = np.array([[0, 0, 1023], [512, 4095, 4095]]) / 4095
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-7)
    assert note is None
    if syntax != ExplicitVRBigEndian:
        dataset = pydicom.dcmread(path)
        np.testing.assert_allclose(values, apply_voi_lut(dataset.pixel_array, dataset) / 4095, rtol=0, atol=1e-7)


def test_a_voi_table_of_bytes(write: Write) -> None:
    table = Dataset()
    table.LUTDescriptor = [4, 0, 8]
    table.add_new("LUTData", "OW", bytes([0, 51, 102, 255]))
    values, *_ = read_dicom(write(np.array([[0, 1, 2, 300]], np.uint16), VOILUTSequence=[table]))
    np.testing.assert_allclose(values, [[0, 0.2, 0.4, 1]], rtol=0, atol=1e-7)


def test_in_monochrome1_the_least_is_white(write: Write) -> None:
    fields = {"VOILUTFunction": "LINEAR_EXACT", "PhotometricInterpretation": "MONOCHROME1"}
    values, *_ = read_dicom(write(np.array([[0, 25, 100]], np.uint8), WindowCenter=50, WindowWidth=100, **fields))
    np.testing.assert_allclose(values, [[1, 0.75, 0]], rtol=0, atol=1e-7)


def test_of_several_windows_the_first_is_taken(write: Write) -> None:
    fields = {"WindowCenter": [50, 5000], "WindowWidth": [100, 3], "VOILUTFunction": "LINEAR_EXACT"}
    values, note, _ = read_dicom(write(np.array([[0, 25, 100]], np.uint16), **fields))
    np.testing.assert_allclose(values, [[0, 0.25, 1]], rtol=0, atol=1e-7)
    assert note is None


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"WindowCenter": 3}, {"WindowCenter": 3, "WindowWidth": 0},
        {"WindowCenter": 3, "WindowWidth": 0, "VOILUTFunction": "SIGMOID"}, {"WindowCenter": [], "WindowWidth": []},
        {"WindowCenter": None, "WindowWidth": None},
    ],
)  # fmt: skip
def test_without_a_window_their_own_range_is_taken(write: Write, fields: dict[str, Any]) -> None:
    values, note, _ = read_dicom(write(VALUES, RescaleSlope=1, RescaleIntercept=10, **fields))
    np.testing.assert_allclose(values, (VALUES + 200) / 440, rtol=0, atol=1e-7)
    assert note == "the file has no usable window: using the full range of values, -190 to 250"


@pytest.mark.parametrize(("kind", "level"), [("MONOCHROME2", 0), ("MONOCHROME1", 1)])
def test_a_constant_picture_without_a_window_is_black(write: Write, kind: str, level: int) -> None:
    values, *_ = read_dicom(write(np.full((1, 1), 700, np.uint16), PhotometricInterpretation=kind))
    assert values.tolist() == [[level]]


def test_floats_that_are_not_finite_become_the_least_and_the_largest(tmp_path: Path) -> None:
    dataset = make(np.zeros((1, 5), np.uint16))
    del dataset.PixelData, dataset.PixelRepresentation, dataset.BitsStored, dataset.HighBit
    dataset.BitsAllocated = 32
    dataset.FloatPixelData = np.array([np.nan, -np.inf, 2, 4, np.inf], np.float32).tobytes()
    values, *_ = read_dicom(save(tmp_path / "a.dcm", dataset))
    np.testing.assert_allclose(values, [[0, 0, 0, 1, 1]])


COLOURS = np.array([[[255, 0, 10], [20, 30, 40], [7, 8, 9]]], np.uint8)


def test_colours_are_rgb(write: Write) -> None:
    values, note, _ = read_dicom(write(COLOURS, PhotometricInterpretation="RGB"))
    assert values.dtype == np.uint8
    assert note is None
    np.testing.assert_array_equal(values, COLOURS)


def test_luminance_and_chrominance_become_rgb(write: Write) -> None:
    red = np.array([[[76, 85, 255], [128, 128, 128]]], np.uint8)
    values, *_ = read_dicom(write(red, PhotometricInterpretation="YBR_FULL"))
    # R = Y + 1.402 (Cr - 128), G = Y - 0.344136 (Cb - 128) - 0.714136 (Cr - 128), B = Y + 1.772 (Cb - 128)
    np.testing.assert_array_equal(values, [[[254, 0, 0], [128, 128, 128]]])


def test_deep_colours_become_eight_bits(write: Write) -> None:
    deep = np.array([[[0, 2048, 4095], [4095, 0, 16]]], np.uint16)
    values, *_ = read_dicom(write(deep, PhotometricInterpretation="RGB", BitsStored=12, HighBit=11))
    np.testing.assert_array_equal(values, [[[0, 128, 255], [255, 0, 1]]])


def test_a_palette_has_its_colours(write: Write) -> None:
    fields: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for name, entries in {"Red": [0, 65535, 257], "Green": [65535, 0, 514], "Blue": [0, 0, 32896]}.items():
        fields[f"{name}PaletteColorLookupTableDescriptor"] = [3, 0, 16]
        fields[f"{name}PaletteColorLookupTableData"] = struct.pack("<3H", *entries)
    values, *_ = read_dicom(write(np.array([[0, 1, 2]], np.uint8), **fields))
    np.testing.assert_array_equal(values, [[[0, 255, 0], [255, 0, 0], [1, 2, 128]]])


def test_of_several_frames_the_first_is_read_and_said(write: Write) -> None:
    frames = np.stack([VALUES, VALUES + 1000, VALUES * 0])
    values, note, _ = read_dicom(write(frames, NumberOfFrames=3, WindowCenter=40, WindowWidth=400))
    np.testing.assert_allclose(values[1], [199 / 399, 200 / 399, 1], rtol=0, atol=1e-7)
    assert note == "the first of 3 frames"
    _, note, _ = read_dicom(write(frames, NumberOfFrames=3))
    assert note == "the first of 3 frames; the file has no usable window: using the full range of values, -200 to 240"


@pytest.mark.parametrize("place", ["PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence"])
def test_the_frames_own_window_and_slope_are_found(write: Write, place: str) -> None:
    window, rescale, group = Dataset(), Dataset(), Dataset()
    window.WindowCenter, window.WindowWidth, window.VOILUTFunction = 80, 400, "LINEAR_EXACT"
    rescale.RescaleSlope, rescale.RescaleIntercept = 2, -2048
    group.FrameVOILUTSequence, group.PixelValueTransformationSequence = [window], [rescale]
    frames = np.array([[[1024, 1064, 1164]], [[0, 0, 0]]], np.uint16)
    values, note, _ = read_dicom(write(frames, NumberOfFrames=2, **{place: [group, Dataset()]}))
    np.testing.assert_allclose(values, [[0.3, 0.5, 1]], rtol=0, atol=1e-7)
    assert note == "the first of 2 frames"


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless])
def test_compressed_files_are_read_where_a_decoder_is_there(tmp_path: Path, syntax: str) -> None:
    stored = np.random.default_rng(0).integers(0, 4096, (16, 20), dtype=np.uint16)
    dataset = make(stored, WindowCenter=2048, WindowWidth=4096, VOILUTFunction="LINEAR_EXACT")
    if syntax == RLELossless:
        dataset.compress(RLELossless, generate_instance_uid=False)
    else:
        import io

        from PIL import Image
        from pydicom.encaps import encapsulate

        buffer = io.BytesIO()
        Image.fromarray(stored).save(buffer, "JPEG2000", irreversible=False, no_jp2=True)
        dataset.PixelData = encapsulate([buffer.getvalue()])
        dataset.file_meta.TransferSyntaxUID = syntax
        dataset["PixelData"].VR = "OB"
        dataset["PixelData"].is_undefined_length = True
    values, *_ = read_dicom(save(tmp_path / "a.dcm", dataset))
    np.testing.assert_allclose(values, stored / 4096, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "preamble", "expected"),
    [
        ("a.dcm", b"nothing", True), ("a.DICOM", b"nothing", True), ("IM0001", bytes(128) + b"DICM", True),
        ("1.2.840.113", b"x" * 128 + b"DICM....", True), ("a.png", b"x" * 127 + b"DICM.....", False),
        ("IM0001", b"DICM", False), ("empty", b"", False),
    ],
)  # fmt: skip
def test_a_dicom_file_is_known_by_its_suffix_or_by_its_beginning(
    tmp_path: Path, name: str, preamble: bytes, expected: bool
) -> None:
    (tmp_path / name).write_bytes(preamble)
    assert is_dicom(tmp_path / name) is expected
    assert is_dicom(str(tmp_path / name)) is expected


def test_what_is_not_there_is_known_by_its_suffix(tmp_path: Path) -> None:
    assert is_dicom(tmp_path / "missing.dcm")
    assert not is_dicom(tmp_path / "missing")
    assert not is_dicom(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "is not a file")


def test_the_reader_takes_a_file_without_a_suffix(write: Write, tmp_path: Path) -> None:
    path = write(VALUES, WindowCenter=40, WindowWidth=400).rename(tmp_path / "IM0001")
    reading = read_image_file(path)
    np.testing.assert_allclose(reading.values[1], [199 / 399, 200 / 399, 1], rtol=0, atol=1e-7)
    expected = np.array([[0, 0, 102], [127, 128, 255]])  # 255 * 160 / 399 is 102.3, and 255 * 199 / 399 is 127.2
    np.testing.assert_array_equal(reading.picture, np.repeat(expected[..., None], 3, axis=2))
    assert reading.note is None


def refuse(path: Path, reason: str) -> None:
    """Check that reading fails with a one-line message with the file's name and this reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom warns about some of these files
        with pytest.raises(ImageError) as caught:
            read_image_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert reason in message


def test_what_is_no_dicom_file_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "missing.dcm", "does not exist")
    (tmp_path / "folder.dcm").mkdir()
    refuse(tmp_path / "folder.dcm", "is not a file")
    (tmp_path / "empty.dcm").touch()
    refuse(tmp_path / "empty.dcm", "is empty")
    (tmp_path / "text.dcm").write_bytes(b"no picture " * 50)
    refuse(tmp_path / "text.dcm", "is not a DICOM file: there is no 'DICM' at byte 128")
    with pytest.raises(ImageError, match="expected a string"):
        read_dicom(3)  # type: ignore[arg-type]


def test_a_file_without_a_picture_is_refused(tmp_path: Path) -> None:
    dataset = make(VALUES)
    del dataset.PixelData
    refuse(save(tmp_path / "report.dcm", dataset), "contains no image, or is cut off: there is no Pixel Data")


def test_a_file_that_was_cut_off_is_refused_wherever_that_was(write: Write) -> None:
    path = write(np.arange(600, dtype=np.uint16).reshape(20, 30), WindowCenter=40, WindowWidth=400)
    data = path.read_bytes()
    assert read_dicom(path)[0].shape == (20, 30)
    for length in [*range(140, len(data) - 1200, 37), len(data) - 1000, len(data) - 2]:
        path.write_bytes(data[:length])
        refuse(path, "")


def test_a_compressed_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    dataset = make(np.random.default_rng(0).integers(0, 4096, (40, 50), dtype=np.uint16))
    dataset.compress(RLELossless, generate_instance_uid=False)
    path = save(tmp_path / "a.dcm", dataset)
    path.write_bytes(path.read_bytes()[:-1500])
    refuse(path, "cut off")


@pytest.mark.parametrize(
    ("syntax", "reason"),
    [
        (JPEGLSLossless, "is compressed as JPEG-LS Lossless Image Compression, for which pydicom needs a plugin: pip "),
        (MPEG2MPML, "is compressed as MPEG2 Main Profile / Main Level, which pydicom cannot decode"),
        (JPEGBaseline8Bit, "is damaged or cut off, or no installed plugin can decode its JPEG Baseline"),
    ],
)
def test_what_cannot_be_decompressed_says_what_to_install(
    tmp_path: Path, syntax: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydicom.encaps import encapsulate
    from pydicom.pixels.decoders import JPEGLSLosslessDecoder

    monkeypatch.setattr(JPEGLSLosslessDecoder, "_available", {})
    dataset = make(VALUES.astype(np.uint8))
    dataset.PixelData = encapsulate([b"no jpeg" * 4])
    dataset["PixelData"].is_undefined_length = True
    dataset.file_meta.TransferSyntaxUID = syntax
    refuse(save(tmp_path / "a.dcm", dataset), reason)


def test_an_unknown_kind_of_window_is_refused(write: Write) -> None:
    path = write(VALUES, WindowCenter=40, WindowWidth=400, VOILUTFunction="CUBIC")
    refuse(path, "has the window function 'CUBIC', expected LINEAR, LINEAR_EXACT or SIGMOID")


def test_without_pydicom_the_line_that_installs_it_is_printed(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path, really_import = write(VALUES), builtins.__import__

    def fail(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("pydicom"):
            raise ImportError("No module named 'pydicom'")
        return really_import(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    refuse(path, 'is a DICOM file, which needs pydicom 3: pip install ".[dicom]" in a clone of gradcam')


def test_pydicom_is_imported_only_for_its_files(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, numpy, gradcam; from PIL import Image; from gradcam.models.preprocess import read_image_file;"
        "Image.fromarray(numpy.zeros((2, 2), 'uint16')).save(sys.argv[1]); read_image_file(sys.argv[1]);"
        "print('pydicom' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.png")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_file_that_claims_or_unpacks_to_too_much_is_refused_before_it_does(write: Write, tmp_path: Path) -> None:
    with pytest.raises(
        ImageError, match=r"has 60000 x 60000 pixels and needs 60.3 GiB to read, but the limit is 1 GiB"
    ):
        read_dicom(write(VALUES, Rows=60000, Columns=60000))
    full = write(VALUES, syntax=DeflatedExplicitVRLittleEndian)
    assert read_dicom(full)[0].shape == VALUES.shape
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    zeros = b"".join([*(packer.compress(bytes(2**20)) for _ in range(1500)), packer.flush()])
    meta_length = 128 + 4 + 12 + pydicom.filereader.read_file_meta_info(full).FileMetaInformationGroupLength
    (tmp_path / "bomb.dcm").write_bytes(full.read_bytes()[:meta_length] + zeros)
    with pytest.raises(ImageError, match=r"bomb.dcm: is so large that it needs 1 GiB to read, but the limit is 1 GiB"):
        read_dicom(tmp_path / "bomb.dcm")
