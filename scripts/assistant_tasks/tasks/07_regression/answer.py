"""Explain predicted prices."""


def explain(model, images, photos, folder):
    """Return values (N,) and signed maps (N,h,w), and write one overlay per image to the pathlib.Path `folder`."""
    raise NotImplementedError
