"""
A model with two inputs
=======================

The model takes an image and a vector. The vector selects a shape or a colour, and the score is high if the
image contains this shape or colour. The heatmap depends on both inputs.
"""

import numpy as np
import torch

import gradcam
from tests import drawn
from tests.drawn.heads import PROPERTIES, draw_training_scenes, fit_head, list_properties
from tests.drawn.measures import draw_three
from tests.drawn.pictures import to_images


class Answer(torch.nn.Module):
    """Compute the score (N,) of a question (N,14): a one-hot vector that selects a shape or a colour."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, image, question):
        return (self.head(self.backbone(image)) * question).sum(1)


backbone, scenes = drawn.load("convolutional").visual, draw_training_scenes()
backbone.project = torch.nn.Identity()
model = Answer(backbone, fit_head(backbone, scenes, list_properties(scenes)))

# %%
# Ask three questions about the same image.
scene = next(draw_three(6, 1, alike=False))
questions = ["star", "purple", "triangle"]
batch = {
    "image": to_images([scene] * len(questions)),
    "question": torch.eye(len(PROPERTIES))[[PROPERTIES.index(name) for name in questions]],
}
explanation = gradcam.explain(model, batch, method="hirescam")
print({name: f"{score:.2f}" for name, score in zip(questions, explanation.output.tolist())})
large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display
overlays = [gradcam.overlay(large, heatmaps[0], region=(0, 0, 288, 288)) for heatmaps in explanation.heatmaps]
gradcam.write_image("questions.png", np.hstack([large, *overlays]))
