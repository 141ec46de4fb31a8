"""Two runs of the command write the promised files, the second one only those of a new image; the summary is right."""

import io
import os
import shutil
from pathlib import Path

import numpy as np
from common import ASSETS, run_check, run_command


def check(answer):
    Path("photos/sub").mkdir(parents=True)
    shutil.copy(ASSETS / "coffee.jpg", "photos/a.jpg")
    shutil.copy(ASSETS / "macaw.webp", "photos/sub/b.webp")
    Path("photos/broken.jpg").write_bytes(b"no image")
    first = run(answer.COMMAND)
    assert len(list_files("*.npy")) == 4, f"{len(list_files('*.npy'))} raw maps of 2 images, not 4"
    assert len(list_files("*.jpg") + list_files("*.png")) >= 4, "overlays are missing"
    shutil.copy(ASSETS / "rocket.jpg", "photos/sub/c.jpg")
    second = run(answer.COMMAND)
    for path in list_files("*.npy"):
        array = np.load(io.BytesIO(path.read_bytes()))
        assert array.ndim >= 2, f"{path} has the shape {array.shape}"
    assert len(list_files("*.npy")) == 6, "the second run did not write the maps of the new image"
    assert all(second.get(path) == time for path, time in first.items()), "the second run wrote earlier files again"
    labels, failed = answer.summarise("explained")
    expected = {"a.jpg": "espresso", "sub/b.webp": "macaw", "sub/c.jpg": "missile"}
    assert labels == expected, f"the classes are {labels}"
    assert list(failed) == ["broken.jpg"], f"the failed images are {failed}"


def list_files(pattern):
    return [path for path in Path("explained").rglob(pattern) if "report" not in path.parts]


def run(line):
    """Run the command, and return the time of each raw map and overlay."""
    ended = run_command(line)
    assert Path("explained/index.html").exists(), f"no gallery. Exit status {ended.returncode}: {ended.stderr[-200:]}"
    return {path: os.stat(path).st_mtime_ns for kind in ("*.npy", "*gradcam*.jpg") for path in list_files(kind)}


if __name__ == "__main__":
    run_check(check)
