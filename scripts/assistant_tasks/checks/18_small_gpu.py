"""Classes, overlays, batch sizes and precision are as requested."""

from pathlib import Path

import cv2
import numpy as np
import torch
from common import ASSETS, SmallNet, read_rgb, run_check
from PIL import Image

SOURCES = (
    "coffee.jpg",
    "chelsea.jpg",
    "rocket.jpg",
    "macaw.webp",
    "koala.webp",
    "panda.webp",
    "flower.jpg",
    "china.jpg",
)


class Recorded(SmallNet):
    """A classifier that records the batch size and type of its input."""

    def forward(self, images):
        RUNS.append((len(images), images.dtype, tuple(images.shape[1:])))
        return super().forward(images)


RUNS: list = []


def check(answer):
    photos, folder = Path("photos"), Path("overlays")
    photos.mkdir()
    folder.mkdir()
    for name in SOURCES:
        with Image.open(ASSETS / name) as image:
            image.convert("RGB").resize((150, 110)).save(photos / f"{Path(name).stem}.jpg", quality=95)
    model = Recorded(4, seed=12).eval()
    expected, margins = {}, {}
    for path in sorted(photos.iterdir()):
        resized = cv2.resize(np.asarray(read_rgb(path)), (96, 96), interpolation=cv2.INTER_AREA)
        images = torch.from_numpy(resized).permute(2, 0, 1)[None] / 255
        with torch.no_grad():
            top = model((images - 0.5) / 0.25)[0].topk(2)
        expected[path.name], margins[path.name] = f"class {int(top.indices[0])}", float(top.values[0] - top.values[1])
    RUNS.clear()
    labels = [f"class {number}" for number in range(4)]
    received = answer.explain(model, labels, photos, folder)
    assert RUNS, "the model did not run"
    assert max(count for count, _, _ in RUNS) <= 3, (
        f"the model had {max(count for count, _, _ in RUNS)} images at a time"
    )
    full = [count for count, kind, _ in RUNS if kind != torch.bfloat16]
    assert not full, f"{sum(full)} images were not bfloat16"
    assert all(shape == (3, 96, 96) for _, _, shape in RUNS), f"the model's input is {RUNS[0][2]}"
    assert set(received) == set(expected), f"the files are {sorted(received)}"
    wrong = [name for name in expected if received[name] != expected[name] and margins[name] > 0.02]
    assert not wrong, f"the class of {', '.join(wrong)} is wrong"
    for name in expected:
        overlay = read_rgb(folder / f"{Path(name).stem}.png")
        assert overlay.shape == (110, 150, 3), f"the overlay of {name} has the shape {overlay.shape}"


if __name__ == "__main__":
    run_check(check)
