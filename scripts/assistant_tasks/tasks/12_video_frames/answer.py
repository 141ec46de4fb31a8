"""Explain a clip."""


def explain(model, clip, target, path):
    """Return the map (t,h,w) and the number of the strongest frame, and write this frame's overlay to `path`."""
    raise NotImplementedError
