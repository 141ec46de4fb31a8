"""Targets to explain: classes, boxes, masks, keypoints, sentences, words, reference images, or output functions."""

from gradcam.lazy import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
