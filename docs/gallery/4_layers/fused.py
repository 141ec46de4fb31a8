"""
Several layers in one heatmap
=============================

The first image is the mean of the heatmaps of two layers, each divided by its maximum.
The second image is the sum of the raw maps of both layers, on the finer of the two grids.
"""

import gradcam

classifier = gradcam.load_classifier()
explanations = classifier.compare("assets/panda.webp", layers=["layer3", "layer4"], methods=["layercam"])
fused = gradcam.fuse(explanations, reduction="mean")
fused.save("fused.png")

classifier.explain("assets/panda.webp", layers=["layer3", "layer4"], join="sum", method="layercam").save("added.png")
