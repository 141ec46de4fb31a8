"""
Guided Grad-CAM
===============

Fine detail from guided backpropagation, limited to the region of the class by Grad-CAM.
"""

import gradcam

classifier = gradcam.load_classifier()
attribution = classifier.attribute("assets/chelsea.jpg", "guided-gradcam")
gradcam.write_image("guided.png", attribution.draw())
