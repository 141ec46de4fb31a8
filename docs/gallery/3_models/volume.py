"""
Volumes: balls and cubes
========================

A small 3-D network learns in seconds whether a volume contains a ball, a cube, or both. Each class has its own heatmap
with the size of the volume. Video clips work the same way.
"""

import numpy as np
import torch
from torch import nn

import gradcam


def draw_volume(rng, classes):
    """Draw a ball, a cube or both in noise: (1,24,24,24)."""
    volume = 0.2 * rng.random((24, 24, 24))
    centres = rng.integers(5, 19, (2, 3))
    while np.abs(centres[0] - centres[1]).max() < 9:
        centres = rng.integers(5, 19, (2, 3))
    for is_ball, centre in zip((True, False), centres):
        offsets = np.abs(np.indices(volume.shape) - centre[:, None, None, None])
        shape = np.sqrt((offsets**2).sum(0)) < 5 if is_ball else offsets.max(0) < 4
        volume += 0.7 * shape * classes[0 if is_ball else 1]
    return torch.from_numpy(volume).float()[None]


rng = np.random.default_rng(0)
classes = torch.from_numpy(rng.integers(0, 2, (240, 2))).float()
volumes = torch.stack([draw_volume(rng, row.numpy()) for row in classes])

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv3d(1, 8, 4, stride=2, padding=1), nn.BatchNorm3d(8), nn.ReLU()),
    *(nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU()),
    *(nn.Conv3d(16, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU()),
    *(nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(16, 2)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(10):
    for rows in torch.randperm(240).split(16):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(volumes[rows]), classes[rows]).backward()
        optimizer.step()
model.eval()

# %%
# Explain both classes of a new volume, and draw the slice with the largest value of each heatmap.
volume = draw_volume(rng, (1, 1))
explanation = gradcam.explain(model, volume[None], target=[[0, 1]])
print([f"{score:.2f}" for score in explanation.output[0].sigmoid().tolist()], tuple(explanation.heatmaps.shape))
images = []
for name, heatmap in zip(("ball", "cube"), explanation.heatmaps[0]):
    depth = int(heatmap.amax((1, 2)).argmax())
    print(f"{name}: slice {depth}")
    frame = (255 * volume[0, depth].clamp(0, 1)).byte().numpy().repeat(12, 0).repeat(12, 1)
    frame = np.stack([frame] * 3, -1)
    images += [frame, gradcam.overlay(frame, heatmap[depth], region=(0, 0, 288, 288))]
gradcam.write_image("slices.png", np.hstack(images))
