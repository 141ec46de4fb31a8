"""
Guided Grad-CAM
===============

Fine lines from guided backpropagation, where Grad-CAM sees the class.
"""

import gradcam

classifier = gradcam.load_classifier()
attribution = classifier.attribute("assets/chelsea.jpg", "guided-gradcam")
gradcam.write_image("guided.png", attribution.picture())
