"""What a study finds: one number for each image, method and metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """One number of the map of one image by one method.

    `image`: the picture's name; a mosaic has those of its four pictures, with " + " between them. `method`: a key of
    `METHODS` or of `CONTROLS`. `metric`: a key of `METRICS`. `index`, `label`: the class that was explained; a mosaic has
    four of them, so that its index is None. The label is None where nobody knows it.
    """

    image: str
    method: str
    metric: str
    value: float
    index: int | None
    label: str | None
