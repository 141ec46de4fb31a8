"""
A vision transformer
====================

The target layer and the token grid are detected automatically. The weights are random here, so only the shapes matter.
"""

import timm
import torch

import gradcam

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval()
image = gradcam.read_image("assets/chelsea.jpg")
classifier = gradcam.load_classifier(model, mean=[0.5] * 3, std=[0.5] * 3, size=224)

explanation = classifier.explain(image, target=3)
print(explanation.layer, tuple(explanation.maps.shape))
explanation.save("vit.png")

# %%
# Attention rollout follows the attention through all blocks, so it needs no target layer.
classifier.explain(image, target=3, method="rollout").save("rollout.png")
