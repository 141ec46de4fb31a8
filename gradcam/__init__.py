"""See where a PyTorch vision model looks: Grad-CAM and related methods, exact, for about the cost of one inference.

import gradcam

explanation = gradcam.explain(model, images, "layer4", target=281)     # any PyTorch model
explanation = gradcam.load_classifier().explain("photo.jpg")           # the embedded classifier
"""

from gradcam.lazy import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
