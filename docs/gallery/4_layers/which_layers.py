"""
List the possible target layers
===============================

Get the table of `gradcam layers` in Python.
"""

import torch

import gradcam

classifier = gradcam.load_classifier()
rows = gradcam.list_layers(classifier.model, torch.zeros(1, 3, 224, 224))
for row in rows:
    if row.cam and row.name.count(".") == 0:
        mark = "  <- suggested" if row.is_suggested else ""
        print(f"{row.name:8} {row.grid!s:10} both signs: {row.both_signs}{mark}")

names = [row.name for row in rows if row.cam and row.name.startswith("layer") and row.name.count(".") == 0]
explanations = classifier.compare("assets/koala.webp", layers=names, methods=["gradcam"])
gradcam.write_image("layers.png", gradcam.panel(explanations))
