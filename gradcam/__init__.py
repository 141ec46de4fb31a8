"""Where a vision model looked: Grad-CAM and its family, exact, at the price of one inference.

import gradcam

explanation = gradcam.explain(model, images, "layer4", target=281)     # any PyTorch model
explanation = gradcam.load_classifier().explain("photo.jpg")           # the one that comes with the package
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
