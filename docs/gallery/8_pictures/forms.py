"""
Pictures in every form
======================

Paths, bytes, PIL's pictures, arrays and tensors give the same map.
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
maps = [classifier.explain(form).maps for form in forms]
print(all(torch.equal(each, maps[0]) for each in maps))
print(np.asarray(array).shape, tuple(maps[0].shape))
