"""
Swin Transformer: channels last
===============================

Layers with output (N,h,w,C) are recognised, too.
"""

import torch
import torchvision

import gradcam

torch.manual_seed(0)
model = torchvision.models.swin_t(weights=None, num_classes=10).eval()
images = torch.randn(1, 3, 224, 224)
for row in gradcam.list_layers(model, images):
    if row.is_suggested:
        print(row)
explanation = gradcam.explain(model, images, target=1)
heatmap = explanation.heatmaps[0, 0]
gradcam.write_image("swin.png", gradcam.overlay(gradcam.read_image("assets/china.jpg"), heatmap))
