"""Draw a figure for a paper."""


def draw(photo, classes, path):
    """Explain the photograph (a path) for two class names, and write the figure. Return the two probabilities."""
    raise NotImplementedError
