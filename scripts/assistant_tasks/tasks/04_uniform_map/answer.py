"""Find out why the map has one value only, and choose a better layer."""

CAUSES = [
    "the layer comes after the pooling, so its output has one cell and no places",
    "the layer is in a branch that does not affect the score",
    "the heatmap is divided by its own maximum",
    "the layer is a 1 x 1 convolution, whose gradient is the same everywhere",
    "the gradient is zero, because the score is saturated",
]
CAUSE = None
LAYER = None


def explain(model, images, target):
    """Return maps (N,h,w) of the class `target`, for images (N,3,H,W)."""
    raise NotImplementedError
