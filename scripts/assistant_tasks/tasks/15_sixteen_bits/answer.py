"""Explain a 16-bit scan."""


def explain(model, scan, path):
    """Return the probability of a fracture, and write the overlay to `path`."""
    raise NotImplementedError
