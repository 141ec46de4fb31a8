"""The map equals plain autograd, the frame is one of the strongest, and the overlay has the frame's size."""

from pathlib import Path

import numpy as np
import torch
from common import expect_map, expect_unchanged, grad_cam, pick, read_rgb, record_state, run_check
from torch import nn


class ClipModel(nn.Module):
    """A classifier of clips (N,T,C,H,W)."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(3, 8, 3, (2, 2, 2), 1), nn.ReLU(), nn.Conv3d(8, 12, 3, (1, 2, 2), 1), nn.ReLU()
        )
        self.head = nn.Linear(12, 4)

    def forward(self, clips):
        return self.head(self.features(clips.transpose(1, 2)).mean((2, 3, 4)))


def check(answer):
    model = ClipModel().eval()
    clip = torch.rand(1, 12, 3, 32, 40) * 0.3
    clip[:, 8:10, :, 8:24, 10:30] += 0.7
    target = choose_class(model, clip)
    expected = grad_cam(model, "features", [clip], pick(target))[0]
    before = record_state(model)
    received, number = answer.explain(model, clip, target, Path("frame.png"))
    expect_unchanged(before, model)
    expect_map(received, expected)
    means = nn.functional.interpolate(expected[None, None], clip.shape[1:2] + clip.shape[3:], mode="trilinear")[0, 0]
    strongest = int(means.mean((1, 2)).argmax())
    assert abs(int(number) - strongest) <= 1, f"frame {number} is not the strongest one"
    overlay = read_rgb("frame.png")
    assert overlay.shape == (32, 40, 3), f"the overlay has the shape {overlay.shape}"
    frame = (clip[0, int(number)] * 255).byte().permute(1, 2, 0).numpy()
    assert np.abs(overlay.astype(int) - frame).max() > 20, "the overlay shows no heatmap"


def choose_class(model, clip):
    """Return the class whose map is strongest in the bright frames."""
    maps = [grad_cam(model, "features", [clip], pick(c))[0].mean((1, 2)) for c in range(4)]
    return max(range(4), key=lambda c: float(maps[c].max() - maps[c].median()))


if __name__ == "__main__":
    run_check(check)
