"""The probability is that of all 16 bits, and the overlay is an RGB image of the scan's size that shows the scan."""

from pathlib import Path

import cv2
import numpy as np
import torch
from common import SmallNet, expect_unchanged, make_scene, read_rgb, record_state, run_check


def check(answer):
    model = SmallNet(1, channels=1, seed=9).eval()
    coarse = (make_scene(60)[0, 0].sigmoid() * 40).numpy().astype(np.uint16) * 256 + 20000
    fine = coarse + np.random.default_rng(0).integers(0, 255, coarse.shape).astype(np.uint16)
    with torch.no_grad():
        model.head.weight *= 3000
        model.head.bias -= model(normalise(coarse))[0]
    probabilities = []
    for name, values in {"coarse": coarse, "fine": fine}.items():
        cv2.imwrite(f"{name}.png", values)
        before = record_state(model)
        received = float(answer.explain(model, f"{name}.png", Path(f"{name}-overlay.png")))
        expect_unchanged(before, model)
        with torch.no_grad():
            expected = float(model(normalise(values)).sigmoid())
        assert abs(received - expected) < 1e-4, f"the probability is {received:.4f}, not {expected:.4f}"
        probabilities.append(expected)
        overlay = read_rgb(f"{name}-overlay.png")
        assert overlay.shape == (64, 64, 3), f"the overlay has the shape {overlay.shape}"
        assert overlay.std() > 5, "the overlay is flat"
        assert np.ptp(overlay.astype(int), axis=2).max() > 20, "the overlay has no colour"
    assert abs(probabilities[0] - probabilities[1]) > 1e-3, "the check is too weak"


def normalise(values):
    return (torch.from_numpy(values.astype(np.float32))[None, None] / 65535 - 0.5) / 0.25


if __name__ == "__main__":
    run_check(check)
