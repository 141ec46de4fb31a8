"""
Explain a region of a segmentation model
========================================

The score is the mean logit of a class over a region. The target layer is the end of the encoder.
"""

import torch
import torchvision

import gradcam

torch.manual_seed(0)
model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None).eval()
image = gradcam.read_image("assets/chelsea.jpg")
images = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
mask = torch.zeros(images.shape[2:])
mask[100:200, 150:300] = 1


def cat_in_the_middle(output):
    return (output["out"][:, 8] * mask).sum((1, 2)) / mask.sum()


explanation = gradcam.explain(model, images, target=cat_in_the_middle)
print(explanation.layer, tuple(explanation.maps.shape))
gradcam.write_image("region.png", gradcam.overlay(image, explanation.heatmaps[0, 0]))
