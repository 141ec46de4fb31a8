"""Explain a 16-bit scan with a one-logit model: from a checkpoint to an overlay with positive and negative evidence.

    python examples/clinical_16bit.py                              a synthetic scan and a model with random weights
    python examples/clinical_16bit.py scan.dcm --weights last.pth  your own; DICOM needs pip install pydicom

To adapt it, change `build` and the preprocessing in `main`. The model gets all 65536 levels of the file. The overlay is
drawn on an 8-bit version, which screens can display. A heatmap is not a diagnosis: see docs/howto/limits.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

import gradcam


def build() -> nn.Module:
    """Return a model with one input channel and one output logit."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 1),
    )


def make_up_scan() -> Path:
    """Write a bright line on a dark disc, with values below 4096 of 65536, as scanners do."""
    rows, columns = np.mgrid[:256, :256]
    disc = 1200.0 * (np.hypot(rows - 128, columns - 128) < 100)
    line = 2000.0 * (abs(rows - columns + 20) < 3) * (disc > 0)
    noise = np.random.default_rng(0).normal(200, 40, disc.shape)
    path = Path(tempfile.mkdtemp()) / "scan.png"
    Image.fromarray((disc + line + noise).clip(0, 4095).astype(np.uint16)).save(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Explain a 16-bit scan.")
    parser.add_argument("scan", nargs="?", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--output", type=Path, default=Path("explained.png"))
    typed = parser.parse_args()

    scan = typed.scan or make_up_scan()
    labels = ["no fracture", "fracture"]
    classifier = gradcam.load_classifier(
        build(), weights=typed.weights, labels=labels, mean=0.02, std=0.02, size=256, crop=1
    )
    explanation = classifier.explain(scan, target="fracture", evidence="signed")
    explanation.save(typed.output)
    print(f"{scan.name}: {explanation.caption()}")
    for note in filter(None, explanation.notes):
        print(note)
    print(f"{typed.output}: red is evidence for the class, blue is evidence against it")


if __name__ == "__main__":
    main()
