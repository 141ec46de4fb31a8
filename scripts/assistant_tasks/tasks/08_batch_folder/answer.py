"""Explain a growing folder."""

COMMAND = None


def summarise(folder):
    """Return ({image: class name}, [failed image]) for the folder with the results."""
    raise NotImplementedError
