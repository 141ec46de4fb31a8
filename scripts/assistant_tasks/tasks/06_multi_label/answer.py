"""Explain the findings in one image."""


def explain(model, image, labels):
    """Return {name: (probability, map)} for the findings with a probability of at least 0.5."""
    raise NotImplementedError
