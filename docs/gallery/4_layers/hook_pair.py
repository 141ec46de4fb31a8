"""
The hook pair by itself
=======================

Activations and gradients of a layer, for what you write yourself.
"""

import torch
import torchvision

import gradcam

torch.manual_seed(0)
model = torchvision.models.vgg11(weights=None).eval()
images = torch.rand(1, 3, 224, 224)

with gradcam.TargetLayer(model.features[18]) as layer:  # a convolution in front of an in-place ReLU
    output = model(images)
    gradients = layer.backward(output[:, 281].sum())

weights = gradients.mean((2, 3), keepdim=True)
maps = (weights * layer.activations).sum(1).relu()
print(torch.allclose(maps, gradcam.explain(model, images, "features.18", target=281).maps[:, 0]))
