"""
Extract features
================

The forward pass ends at the requested layer. This example compares images by their features.
"""

import matplotlib.pyplot as plt
import torch

import gradcam
from gradcam import inspection

classifier = gradcam.load_classifier()
names = ["koala", "panda", "polar_bear", "macaw"]
images = classifier.batch([classifier.prepare(f"assets/{name}.webp") for name in names])
features = inspection.features(classifier.model, images, ["head.1"])["head.1"].flatten(1)
likeness = torch.nn.functional.cosine_similarity(features[:, None], features[None], dim=2)
for name, row in zip(names, likeness):
    print(f"{name:11}", " ".join(f"{value:.2f}" for value in row))

figure, axes = plt.subplots(figsize=(4.5, 4), layout="constrained")
grid = axes.imshow(likeness, vmin=0, vmax=1, cmap="viridis")
axes.set_xticks(range(4), names, rotation=30)
axes.set_yticks(range(4), names)
figure.colorbar(grid, label="cosine similarity")
figure.savefig("likeness.png")
