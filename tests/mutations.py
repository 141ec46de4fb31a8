"""Check that damaged files are read, or refused in one or two lines, quickly and in little memory.

    python -m tests.mutations --pictures 500 --checkpoints 200

Each kind of file has valid examples, a reader, and optionally a repair function that makes checksums right again, so
that the first checksum does not hide the damage. A case is defined by its seed and its number, and can be reproduced:
`--keep FOLDER` saves the files that failed. Files are read in a separate process.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import select
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"
SECONDS = 10.0  # CPU time per file, so that a busy machine makes no difference
PATIENCE = 60.0  # a process that takes longer hangs
# Memory per file: MEMORY_BUDGET_BYTES of gradcam.images.read, and the overhead of the process.
BUDGET = 2**30 + 2**27
ADDRESS_SPACE_BYTES = 2**33  # A bug in a reader must not take down the machine.

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    `make` returns valid examples by name. `read` reads one; it may raise no error but `GradcamError`. `repair` applies
    a change to part of a file, and makes its checksums right.
    """

    make: Callable[[], Files]
    read: Callable[[Path], object]
    repair: Callable[[bytes, Callable[[bytes], bytes]], bytes] = lambda data, change: change(data)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return the data with a few changes, most of them where formats have headers and directories."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        if not changed:
            break
        near = int(min(len(changed) - 1, chance.expovariate(1 / 60)))
        at = chance.choice([near, near, len(changed) - 1 - near, chance.randrange(len(changed))])
        length = chance.choice([1, 2, 4, 8, 40])
        kind = chance.randrange(9)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at : at + length] = chance.randbytes(length)
        elif kind == 2:
            changed[at : at + length] = chance.choice([b"\0", b"\xff", b"\x7f", b"\x80"]) * length
        elif kind in (3, 4):  # numbers, in the encodings that formats use
            form = chance.choice(["<H", ">H", "<I", ">I", "<Q", ">Q"])
            number = chance.choice([0, 1, 255, 1000, 13370, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63])
            size = struct.calcsize(form)
            changed[at : at + size] = struct.pack(form, number % 2 ** (8 * size))
        elif kind == 5:
            del changed[at:]
        elif kind == 6:
            del changed[at : at + length]
        elif kind == 7:
            changed[at:at] = changed[at : at + length] * chance.choice([1, 1, 100])
        else:
            source = chance.randrange(len(changed))
            changed[at : at + length] = changed[source : source + length]
    return bytes(changed)


# Pictures


def make_pictures() -> Files:
    """Make a photograph in each supported format, and some files as they occur in assets."""
    import numpy as np
    from PIL import Image

    with Image.open(ASSETS / "coffee.jpg") as photograph:
        small = photograph.convert("RGB").resize((120, 80))
    deep = np.asarray(small).astype(np.uint16) * 257
    actual = {name: (ASSETS / name).read_bytes() for name in ("chelsea.jpg", "macaw.webp", "camera.png")}

    def save(name: str, picture: Image.Image, **options: object) -> None:
        content = io.BytesIO()
        picture.copy().save(content, **options)
        actual[name] = content.getvalue()

    def several() -> dict[str, object]:  # New images each time, because saving leaves settings on them.
        return {"save_all": True, "append_images": [small.rotate(90), small.rotate(180)]}

    turn = Image.Exif()
    turn[0x0112] = 6
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1"):
        save(f"{mode}.png", small.convert(mode), format="PNG")
    save("grey16.png", Image.fromarray(deep[..., 0]), format="PNG")
    actual["rgb16.png"], actual["rgb16.tiff"] = (encode_deep(deep, suffix) for suffix in (".png", ".tiff"))
    save("plain.jpg", small, format="JPEG", exif=turn)
    save("progressive.jpg", small, format="JPEG", progressive=True)
    save("cmyk.jpg", small.convert("CMYK"), format="JPEG")
    save("several.mpo", small, format="MPO", **several())
    save("lossless.webp", small, format="WEBP", lossless=True)
    save("moving.webp", small, format="WEBP", **several())
    save("moving.gif", small, format="GIF", **several())
    save("plain.bmp", small, format="BMP")
    save("several.tiff", small, format="TIFF", **several())
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits", "group4"):
        picture = small.convert("1") if compression == "group4" else small
        save(f"{compression}.tiff", picture, format="TIFF", compression=compression, tiffinfo={0x0112: 6})
    save("float.tiff", small.convert("F"), format="TIFF")
    save("plain.ppm", small, format="PPM")
    save("packed.tga", small, format="TGA", compression="tga_rle")
    save("plain.ico", small, format="ICO")
    save("old.ico", small, format="ICO", bitmap_format="bmp")
    for suffix, name in ((".jp2", "JPEG2000"), (".avif", "AVIF")):
        if name in Image.SAVE:
            save(f"plain{suffix}", small, format=name)
    return {**actual, **make_dicom(deep[..., 0])}


def encode_deep(values: object, suffix: str) -> bytes:
    import cv2

    return cv2.imencode(suffix, values)[1].tobytes()


def make_dicom(values: object) -> Files:
    try:
        from pydicom import uid
        from pydicom.dataset import FileDataset, FileMetaDataset
    except ImportError:
        return {}
    results = {}
    for syntax in (uid.ExplicitVRLittleEndian, uid.DeflatedExplicitVRLittleEndian, uid.RLELossless):
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian if syntax == uid.RLELossless else syntax
        meta.MediaStorageSOPClassUID = uid.SecondaryCaptureImageStorage
        meta.MediaStorageSOPInstanceUID = "1.2.3"
        dataset = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
        dataset.SOPClassUID, dataset.SOPInstanceUID = meta.MediaStorageSOPClassUID, "1.2.3"
        dataset.Rows, dataset.Columns = values.shape
        dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.PixelRepresentation = 1, "MONOCHROME2", 0
        dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, 16, 15
        dataset.WindowCenter, dataset.WindowWidth = 30000, 50000
        dataset.PixelData = values.tobytes()
        if syntax == uid.RLELossless:
            dataset.compress(syntax, generate_instance_uid=False)
        content = io.BytesIO()
        dataset.save_as(content, enforce_file_format=True)
        results[f"{syntax.keyword}.dcm"] = content.getvalue()
    return results


def read_in_each_way(path: Path) -> None:
    """Read a file, and the bytes read from it elsewhere, for a model and as numbers."""
    from gradcam.errors import GradcamError
    from gradcam.images.read import read_label_mask
    from gradcam.models.preprocess import read_image_file

    with contextlib.suppress(GradcamError):  # a colour image has no numbers
        read_label_mask(path)
    data = path.read_bytes()
    read_image_file(path, data if len(data) % 2 else None)


def repair_png(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Change the decompressed chunk data of a PNG and keep the chunks valid; change any other file directly."""
    if not data.startswith(b"\x89PNG"):
        return change(data)
    at, chunks = 8, [data[:8]]
    while at + 12 <= len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        content = data[at + 8 : at + 8 + length]
        content = (
            zlib.compress(change(zlib.decompress(content)))
            if kind == b"IDAT" and data.count(kind) == 1
            else change(content)
        )
        chunks.append(struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content)))
        at += 12 + length
    return b"".join(chunks)


# Checkpoints


def make_checkpoints() -> Files:
    """Save the weights of a real network, alone and as in training, in each format."""
    import safetensors.torch
    import torch
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    weights = {name: tensor for name, tensor in model.state_dict().items() if tensor.numel() < 5000}
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    training = {"epoch": 3, "model": weights, "optimizer": optimizer, "losses": [0.5] * 100, "args": {"lr": 1e-3}}
    actual = {"weights.safetensors": safetensors.torch.save(weights)}
    for name, content in (("weights", weights), ("training", training)):
        for suffix in (".pt", ".pth"):
            file = io.BytesIO()
            torch.save(content, file, _use_new_zipfile_serialization=suffix == ".pt")
            actual[name + suffix] = file.getvalue()
    return actual


def read_a_checkpoint(path: Path) -> object:
    from gradcam.models.checkpoints.read import read_checkpoint

    return read_checkpoint(path)


def repair_zip(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Change the pickle or an image in a zip and pack it again; change any other file directly."""
    if not data.startswith(b"PK\3\4"):
        return change(data)
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info, change(content) if info.filename.endswith((".pkl", ".png")) else content)
    return packed.getvalue()


# Archives


def make_archives() -> Files:
    """Make each kind of archive with a few images."""
    pictures = {name: data for name, data in make_pictures().items() if name in ("RGB.png", "plain.jpg", "plain.bmp")}
    results = {}
    for mode in ("", ":gz", ":bz2", ":xz"):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode=f"w{mode}") as archive:
            for name, data in pictures.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        results["pictures.tar" + mode.replace(":", ".")] = content.getvalue()
    for number, method in enumerate((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", method) as archive:
            for name, data in pictures.items():
                archive.writestr(name, data)
        results[f"pictures-{number}.zip"] = content.getvalue()
    return results


def read_archive(path: Path) -> None:
    from gradcam.errors import GradcamError
    from gradcam.models.preprocess import read_image_file
    from gradcam.sources.collect import list_inputs

    errors = []
    for item in list_inputs(path).items:
        try:
            read_image_file(Path(item.name), item.content.read())
        except GradcamError as error:
            errors.append(error)
    if errors:
        raise errors[0]


KINDS = {
    "pictures": Kind(make_pictures, read_in_each_way, repair_png),
    "checkpoints": Kind(make_checkpoints, read_a_checkpoint, repair_zip),
    "archives": Kind(make_archives, read_archive, repair_zip),
}


# Reading, and the outcome


@dataclass(frozen=True)
class Outcome:
    """The result for one file: "read", "refused", or a failure. `detail` is the message."""

    case: int
    name: str
    result: str
    detail: str = ""

    @property
    def is_good(self) -> bool:
        return self.result in ("read", "refused")


def make_case(kind: Kind, files: Files, seed: int, case: int) -> tuple[str, bytes]:
    """Return a changed file and its name."""
    chance = random.Random(f"{seed} {case}")
    name = sorted(files)[case % len(files)]
    data = files[name]
    if chance.random() < 0.5:
        return name, mutate(data, chance)
    return name, kind.repair(data, lambda part: mutate(part, chance) if chance.random() < 0.5 else part)


def examine(name: str, seed: int, cases: Sequence[int], keep: Path | None = None) -> Iterator[Outcome]:
    """Read many changed files of a kind, in processes that may crash, and yield the outcomes."""
    remaining = list(cases)
    while remaining:
        for outcome in _read_on(name, seed, remaining, keep):
            remaining.remove(outcome.case)
            yield outcome


def _read_on(name: str, seed: int, cases: Sequence[int], keep: Path | None) -> Iterator[Outcome]:
    """Yield outcomes until all cases are done, or one ends the process; the crash is then the last outcome."""
    numbers = f"{cases[0]}:{cases[-1] + 1}"
    command = [sys.executable, "-m", "tests.mutations", "--child", name, numbers, "--seed", str(seed)]
    command += ["--keep", str(keep)] if keep else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ASSETS.parent) as child:
        assert child.stdout is not None
        started, patience = "", 300.0  # The first wait includes the imports and the valid files.
        while True:
            if not select.select([child.stdout], [], [], patience)[0]:
                child.kill()
                yield Outcome(_number(started, cases), started, f"took more than {patience:.0f} s")
                return
            line = child.stdout.readline().decode()
            if not line:
                break
            data = json.loads(line)
            if isinstance(data, str):
                started, patience = data, PATIENCE
            else:
                started, patience = "", PATIENCE
                yield Outcome(*data)
    if child.returncode and not started:
        raise RuntimeError(f"the process that reads {name} ended with {child.returncode}, and with none of them")
    if started:
        yield Outcome(_number(started, cases), started, f"ended the process with {child.returncode}")


def _number(started: str, cases: Sequence[int]) -> int:
    return int(started.partition(" ")[0] or cases[0])


def work(name: str, seed: int, cases: Sequence[int], keep: Path | None) -> None:
    """Run in the child: print a line before each file, and one with its outcome."""
    from gradcam.errors import GradcamError
    from gradcam.models.checkpoints.read import read_checkpoint  # noqa: F401  before memory is measured

    warnings.simplefilter("ignore")
    kind = KINDS[name]
    files = kind.make()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(folder)
        tempfile.tempdir = elsewhere
        # Read the valid files first: this does all imports, and shows that they can be read.
        for item, data in files.items():
            Path(item).write_bytes(data)
            kind.read(Path(item))
            os.remove(item)
        for case in cases:
            item, data = make_case(kind, files, seed, case)
            path = Path(folder, item)
            path.write_bytes(data)
            print(json.dumps(f"{case} {item}"), flush=True)
            result, detail = _judge(kind, path, GradcamError)
            leftovers = [*(set(os.listdir(folder)) - {item}), *os.listdir(elsewhere)]
            if leftovers:
                result, detail = "left files behind", str(leftovers)
            if keep and result not in ("read", "refused"):
                (keep / f"{name}-{seed}-{case}-{item}").write_bytes(data)
            path.unlink()
            print(json.dumps([case, item, result, detail]), flush=True)


def _judge(kind: Kind, path: Path, expected: type[Exception]) -> tuple[str, str]:
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.process_time()
    try:
        kind.read(path)
        result, detail = "read", ""
    except expected as error:
        result, detail = "refused", str(error)
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"[:300]
    seconds, memory = time.process_time() - start, _status("VmHWM") - before
    if len(detail.splitlines()) > 2 or len(detail) > 2000:
        return "was refused at length", detail[:500]
    if seconds > SECONDS:
        return f"took {seconds:.0f} s", detail
    if memory > BUDGET:
        return f"took {memory / 2**30:.2g} GiB", detail
    return result, detail


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> int:
    """Examine files, and print how many were read, were refused or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in KINDS:
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--child", nargs=2)
    args = parser.parse_args()
    if args.child:
        first, last = map(int, args.child[1].split(":"))
        work(args.child[0], args.seed, range(first, last), args.keep)
        return 0
    bad = 0
    for name in KINDS:
        count = getattr(args, name)
        if not count:
            continue
        outcomes = list(examine(name, args.seed, range(count), args.keep))
        print(f"{name}: {dict(Counter(outcome.result for outcome in outcomes))}")
        for outcome in outcomes:
            if not outcome.is_good:
                print(f"  {outcome}")
                bad += 1
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
