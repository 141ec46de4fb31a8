"""
Supported input formats
=======================

Paths, bytes, PIL images, arrays and tensors give the same heatmap.
"""

import numpy as np
import torch
from PIL import Image

import gradcam

classifier = gradcam.load_classifier()
path = "assets/camera.png"
array = gradcam.read_image(path)
with open(path, "rb") as file:
    data = file.read()
forms = [path, data, Image.open(path), array, torch.from_numpy(array).permute(2, 0, 1)]
explanations = [classifier.explain(form) for form in forms]
print(all(torch.equal(explanation.maps, explanations[0].maps) for explanation in explanations))

gradcam.write_image("forms.jpg", np.hstack([explanation.overlay()[::2, ::2] for explanation in explanations]))
