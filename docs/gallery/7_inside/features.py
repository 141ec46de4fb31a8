"""
Features for a classifier of your own
=====================================

A pass that ends at the layer that is asked for.
"""

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
