"""
A method of your own
====================

A function of activations and gradients goes wherever a method's name goes.
"""

import gradcam


@gradcam.method("mycam", summary="activations times positive gradients")
def mycam(activations, gradients):
    return (activations[:, None] * gradients.clamp(min=0)).sum(2)


classifier = gradcam.load_classifier()
explained = classifier.compare("assets/macaw.webp", layers=["layer4"], methods=["gradcam", mycam])
gradcam.write_image("mine.png", gradcam.panel(explained))
