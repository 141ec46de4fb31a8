"""
Likeness: what makes these two alike?
=====================================

The cosine of two pictures' features, and the map on both. Any network of features can be asked: here the one that comes with
the package, without its classes.
"""

import torch

import gradcam
from gradcam.targets import Like

model = gradcam.load_classifier().model
model.head[-1] = torch.nn.Identity()
matcher = gradcam.load_matcher(model, mean=[0.5] * 3, std=[0.5] * 3)

explanation = matcher.explain("assets/cat_and_espresso.jpg", target=Like("assets/chelsea.jpg"))
print(f"alike by {explanation.scores.item():.2f}")
explanation.save("on_one.png")
explanation.reference.save("on_the_other.png")
