import torch
from torch.nn.functional import interpolate

import gradcam


def prepare(photo):
    width = photo.shape[1]
    middle = photo[:, width // 3 : width // 3 * 2]
    images = torch.from_numpy(middle.copy()).permute(2, 0, 1)[None] / 255
    return interpolate((images - 0.5) / 0.25, (64, 64), mode="bilinear", antialias=True)


def draw(model, photo, target):
    height, width = photo.shape[:2]
    heatmap = gradcam.explain(model, prepare(photo), "features", target=target).heatmaps[0, 0]
    return gradcam.overlay(photo, heatmap, region=(0, width // 3, height, width // 3))
