"""
SmoothGrad
==========

SmoothGrad averages input gradients over noisy copies of the image. From left to right: the image as the model sees it,
the gradients of one copy, and the mean over 25 copies.
"""

import numpy as np

import gradcam

classifier = gradcam.load_classifier()
images = classifier.batch([classifier.prepare("assets/flower.jpg")])
panels = [((images[0] + 1) * 127.5).byte().permute(1, 2, 0).numpy()]
for samples in (1, 25):
    attribution = gradcam.attributions.smoothgrad(classifier.model, images, samples=samples, noise=0.15)
    panels.append(gradcam.attributions.draw_attribution(attribution.values[0, 0]))
gradcam.write_image("smooth.png", np.hstack(panels))
