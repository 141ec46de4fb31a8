"""Find an object by its heatmap."""


def find_box(model, image, target, region):
    """Return (left, top, right, bottom) in pixels of the photograph, or None."""
    raise NotImplementedError
