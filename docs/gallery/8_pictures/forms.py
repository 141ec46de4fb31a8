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
explained = [classifier.explain(form) for form in forms]
print(all(torch.equal(each.maps, explained[0].maps) for each in explained))

gradcam.write_image("forms.jpg", np.hstack([each.overlay()[::2, ::2] for each in explained]))
