"""
Maps for NumPy
==============

Raw values in one file, and back.
"""

import numpy as np

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain(["assets/koala.webp", "assets/panda.webp"])
explanation.save("maps.npz")
with np.load("maps.npz") as file:
    for name in file.files:
        print(f"{name:9} {file[name].shape} {file[name].dtype}")
