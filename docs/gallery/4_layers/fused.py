"""
Several layers in one map
=========================

Heatmaps that have their own maximum first, then their mean; or raw maps, added at the finest grid.
"""

import gradcam

classifier = gradcam.load_classifier()
explained = classifier.compare("assets/panda.webp", layers=["layer3", "layer4"], methods=["layercam"])
fused = gradcam.fuse(explained, how="mean")
fused.save("fused.png")

classifier.explain("assets/panda.webp", layers=["layer3", "layer4"], join="sum", method="layercam").save("added.png")
