"""
The grid pointing game
======================

Four photos of four classes form one mosaic. Each heatmap explains one of the classes. The score of a heatmap is a
share: the sum of its values on the photo of its class, divided by the sum of all its values.
"""

import numpy as np

import gradcam
from gradcam.evaluation import grid_pointing_game, make_mosaics

classifier = gradcam.load_classifier()
names = ["koala", "panda", "macaw", "lemur"]
(mosaic,) = make_mosaics(classifier, {name: f"assets/{name}.webp" for name in names}, limit=1)
image = mosaic.image[None]

for method in ("gradcam", "eigencam"):
    explanation = gradcam.explain(classifier.model, image, "layer4", method=method, target=[list(mosaic.classes)])
    game = grid_pointing_game(explanation)
    print(f"{method:9}", " ".join(f"{name} {share:.2f}" for name, share in zip(mosaic.names, game.mass[0].tolist())))

# %%
# Eigen-CAM makes the same heatmap for all four classes. The shares of the four photos therefore sum to 1, and their
# mean is a quarter.
# The next figure shows Grad-CAM's heatmaps of the four classes:
low, high = mosaic.image.aminmax()
picture = ((mosaic.image - low) / (high - low) * 255).byte().permute(1, 2, 0).numpy()
heatmaps = gradcam.explain(classifier.model, image, "layer4", target=[list(mosaic.classes)]).heatmaps[0]
gradcam.write_image("mosaic.jpg", np.concatenate([gradcam.overlay(picture, heatmap) for heatmap in heatmaps], axis=1))
