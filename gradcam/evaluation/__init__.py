"""How far a map can be trusted: metrics of heatmaps from any library, a check of one explanation, and studies of many.

subject = gradcam.evaluation.Subject(model, images, classes)
gradcam.evaluation.road(subject, heatmaps).combined         # heatmaps (N,H,W), of whatever made them
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
