"""
A multi-label model, and a custom head
======================================

This model, a frozen backbone with a new head, predicts which shapes and colours are in an image. Several labels can be
present, so each has its own sigmoid and its own heatmap.
"""

import numpy as np
import torch

import gradcam
from tests import drawn
from tests.drawn.heads import PROPERTIES, draw_training_scenes, list_properties
from tests.drawn.measures import draw_three
from tests.drawn.pictures import to_images

backbone = drawn.load("convolutional").visual
backbone.project = torch.nn.Identity()  # the features (N,96) instead of an embedding
scenes = draw_training_scenes()
with torch.no_grad():
    features = backbone(to_images(scenes))

# %%
# Train only the head.
torch.manual_seed(0)
head = torch.nn.Linear(features.shape[1], len(PROPERTIES))
optimizer = torch.optim.AdamW(head.parameters(), lr=0.05, weight_decay=0.1)
for _ in range(300):
    optimizer.zero_grad()
    torch.nn.functional.binary_cross_entropy_with_logits(head(features), list_properties(scenes)).backward()
    optimizer.step()
model = torch.nn.Sequential(backbone, head)

# %%
# Explain four labels of one image in one forward pass.
classifier = gradcam.load_classifier(
    model, labels=PROPERTIES, activation="sigmoid", size=96, crop=1, mean=[0] * 3, std=[1] * 3
)
scene = next(draw_three(6, 1, alike=False))
large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display: the model resizes it back
labels = ["star", "triangle", "purple", "white"]
explanation = classifier.explain(large, target=[labels], method="hirescam")
for k in range(len(labels)):
    print(explanation.caption(0, k))
gradcam.write_image("labels.png", np.hstack([large, *(explanation.overlay(0, k) for k in range(len(labels)))]))
