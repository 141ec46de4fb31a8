"""Two classes' overlays differ only where the model sees the photograph, and as much as their heatmaps differ."""

import numpy as np
import torch
from common import SmallNet, expect_unchanged, grad_cam, make_scene, pick, record_state, run_check
from torch.nn.functional import interpolate


def check(answer):
    model = SmallNet(6, seed=6).eval()
    photo = (make_scene(40, (120, 360))[0].sigmoid() * 255).byte().permute(1, 2, 0).numpy()
    images = answer.prepare(photo)
    assert images.shape == (1, 3, 64, 64), "prepare was changed"
    heats = {}
    for target in range(6):
        expected = grad_cam(model, "features", [images], pick(target))
        if expected.max() > 0:
            heats[target] = interpolate(expected[None] / expected.max(), (120, 120), mode="bicubic")[0, 0].clamp(0, 1)
    pairs = [(a, b) for a in heats for b in heats if a < b]
    first, second = max(pairs, key=lambda pair: float((heats[pair[0]] - heats[pair[1]]).abs().mean()))
    before = record_state(model)
    overlays = [np.asarray(answer.draw(model, photo, target)) for target in (first, second)]
    expect_unchanged(before, model)
    for overlay in overlays:
        assert overlay.shape == photo.shape, f"the overlay has the shape {overlay.shape}"
        assert overlay.dtype == np.uint8, f"the overlay is {overlay.dtype}"
    difference = np.abs(overlays[0].astype(float) - overlays[1]).sum(2)
    assert difference[:, :115].max() == 0, "there is heat to the left of what the model sees"
    assert difference[:, 245:].max() == 0, "there is heat to the right of what the model sees"
    expected = (heats[first] - heats[second]).abs().flatten()
    seen = torch.from_numpy(difference[:, 120:240].copy()).float().flatten()
    correlation = float(torch.corrcoef(torch.stack([seen, expected]))[0, 1])
    assert correlation > 0.5, f"the heat is in other places than the evidence (correlation {correlation:.2f})"


if __name__ == "__main__":
    run_check(check)
