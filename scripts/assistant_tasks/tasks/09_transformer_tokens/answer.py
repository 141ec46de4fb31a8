"""Explain a transformer with register tokens."""


def explain(model, images, target):
    """Return maps (N,3,5) of the class `target` at the last layer whose patches affect the score."""
    raise NotImplementedError


def explain_block(model, images, target, number):
    """Return maps (N,3,5) of the class `target` at the first norm of a block."""
    raise NotImplementedError
