"""Explain a folder with little memory."""


def explain(model, labels, photos, folder):
    """Return {file name: class name} for all photographs in `photos`, and write an overlay for each to `folder`."""
    raise NotImplementedError
