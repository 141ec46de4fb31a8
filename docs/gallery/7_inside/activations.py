"""
Draw feature maps
=================

Draw the strongest channels of early and deep layers.
"""

import gradcam
from gradcam import inspection

classifier = gradcam.load_classifier()
images = classifier.batch([classifier.prepare("assets/chelsea.jpg")])
grids = inspection.activations(classifier.model, images, ["stem.0", "layer2", "head.0"])
gradcam.write_image("activations.png", inspection.draw_activations(grids, channels=8))
