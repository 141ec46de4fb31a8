"""
Save heatmaps for NumPy
=======================

Save the raw maps in one file and load them again.
"""

import matplotlib.pyplot as plt
import numpy as np

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain(["assets/koala.webp", "assets/panda.webp"])
explanation.save("maps.npz")
with np.load("maps.npz") as file:
    for name in file.files:
        print(f"{name:9} {file[name].shape} {file[name].dtype}")
    maps = file["maps"][:, 0]

figure, axes = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
for values, axis in zip(maps, axes):
    axis.imshow(values, cmap="magma")  # 7 x 7 raw values of the method
figure.savefig("maps.png")
