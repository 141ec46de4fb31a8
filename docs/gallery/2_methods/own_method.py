"""
A custom CAM method
===================

You can pass a function of activations and gradients wherever a method name is accepted.
"""

import gradcam


@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations, gradients):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)


classifier = gradcam.load_classifier()
explanations = classifier.compare("assets/macaw.webp", layers=["layer4"], methods=["gradcam", mycam])
gradcam.write_image("mine.png", gradcam.panel(explanations))
