"""
Frozen, in training, half precision
===================================

Three models on which naive hooks fail, and the same map from each.
"""

import torch
import torchvision

import gradcam

torch.manual_seed(0)
model = torchvision.models.resnet18(weights=None).eval()
images = torch.rand(1, 3, 224, 224)
plain = gradcam.explain(model, images, "layer4", target=7).maps

model.requires_grad_(False)
print("frozen      ", torch.equal(gradcam.explain(model, images, "layer4", target=7).maps, plain))
model.train()
print("in training ", torch.equal(gradcam.explain(model, images, "layer4", target=7).maps, plain))
model.eval().bfloat16()
half = gradcam.explain(model, images.bfloat16(), "layer4", target=7).maps
print("bfloat16    ", f"correlation {torch.corrcoef(torch.stack([half.flatten(), plain.flatten()]))[0, 1]:.4f}")
