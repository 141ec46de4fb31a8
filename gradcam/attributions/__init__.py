"""Pixel attributions: how much each value of the image contributes to a score.

attribution = gradcam.attributions.integrated_gradients(model, images, target=281)
image = gradcam.attributions.draw_attribution(attribution.values[0, 0])
"""

from gradcam.lazy import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
