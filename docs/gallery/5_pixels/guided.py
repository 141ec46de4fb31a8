"""
Guided Grad-CAM
===============

Guided backpropagation gives fine detail. Grad-CAM limits this detail to the region of the class.
"""

import gradcam

classifier = gradcam.load_classifier()
attribution = classifier.attribute("assets/chelsea.jpg", "guided-gradcam")
gradcam.write_image("guided.png", attribution.draw())
