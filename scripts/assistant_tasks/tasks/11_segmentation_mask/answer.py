"""Explain a part of a segmentation."""


def explain(model, images, box, target):
    """Return the mean logits (N,) of the class in the box, and maps (N,h,w)."""
    raise NotImplementedError
