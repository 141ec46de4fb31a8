"""Evaluate heatmaps from any library: metrics, a check of one explanation, and studies of many images.

subject = gradcam.evaluation.Subject(model, images, classes)
gradcam.evaluation.road(subject, heatmaps).combined         # heatmaps (N,H,W) from any library
"""

from gradcam.lazy import export_lazily
from gradcam.renames import find_old_names

_find, __dir__, __all__ = export_lazily(__name__, __file__)
__getattr__ = find_old_names(__name__, _find)
