"""Explain one detection."""


def explain(detector, image):
    """Return a dict with "box", "score" and "map" for the detection with the second-highest score."""
    raise NotImplementedError
