"""
Image similarity: why are two images alike?
===========================================

The score is the cosine similarity of the features of two images. Each image gets a heatmap. Any feature extractor works.
This example uses the classifier that the package includes, without its last layer.
"""

import torch

import gradcam
from gradcam.targets import Like

model = gradcam.load_classifier().model
model.head[-1] = torch.nn.Identity()
matcher = gradcam.load_matcher(model, mean=[0.5] * 3, std=[0.5] * 3)

explanation = matcher.explain("assets/cat_and_espresso.jpg", target=Like("assets/chelsea.jpg"))
print(f"cosine similarity: {explanation.scores.item():.2f}")
explanation.save("on_one.png")
explanation.reference.save("on_the_other.png")
