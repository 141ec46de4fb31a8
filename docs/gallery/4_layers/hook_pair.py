"""
Use the hooks directly
======================

Get the activations and gradients of a target layer for your own computations.
"""

import torch

import gradcam

classifier = gradcam.load_classifier()
model = classifier.model
images = classifier.batch([classifier.prepare("assets/macaw.webp")])

with gradcam.TargetLayer(model.get_submodule("layer4")) as layer:
    output = model(images)
    gradients = layer.backward(output.max())

weights = gradients.mean((2, 3), keepdim=True)
maps = (weights * layer.activations).sum(1).relu()
print(torch.allclose(maps, gradcam.explain(model, images, "layer4").maps[:, 0]))

image = ((images[0] + 1) * 127.5).byte()
gradcam.write_image("by_hand.png", gradcam.overlay(image, maps[0] / maps.max()))
