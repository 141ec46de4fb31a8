"""The maps have both signs and equal plain autograd; overlays distinguish the signs."""

from pathlib import Path

import numpy as np
import torch
from common import SmallNet, differentiate, expect_map, expect_unchanged, make_scene, read_rgb, record_state, run_check
from common import weigh_channels as weigh
from torch import nn


def check(answer):
    model = nn.Sequential(SmallNet(1, seed=4), nn.Flatten(0)).eval()
    images = torch.cat([make_scene(seed) for seed in (10, 11, 12)])
    activations, gradient, values = differentiate(model, "0.features", [images], lambda output: output)
    expected = weigh(activations, gradient)
    assert expected.min() < 0 < expected.max()
    photos = [np.full((128, 128, 3), 128, np.uint8) for _ in images]
    before = record_state(model)
    received_values, maps = answer.explain(model, images, photos, Path())
    expect_unchanged(before, model)
    torch.testing.assert_close(torch.as_tensor(received_values).detach(), values, msg="the values are wrong")
    expect_map(maps, expected)
    for i, signed in enumerate(expected):
        if signed.min() < 0 < signed.max():
            overlay = read_rgb(f"house{i}.png").astype(float)
            assert overlay.shape == (128, 128, 3), f"the overlay has the shape {overlay.shape}"
            colours = [mean_near(overlay, signed, place) for place in (signed.argmax(), signed.argmin())]
            assert np.abs(colours[0] - colours[1]).max() > 30, "both signs have the same colour in the overlay"


def mean_near(overlay, values, place):
    """Return the mean colour of the cell of the layer's grid."""
    row, column = divmod(int(place), values.shape[1])
    height, width = overlay.shape[0] // values.shape[0], overlay.shape[1] // values.shape[1]
    return overlay[row * height : (row + 1) * height, column * width : (column + 1) * width].mean((0, 1))


if __name__ == "__main__":
    run_check(check)
