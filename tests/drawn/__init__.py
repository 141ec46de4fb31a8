"""Images of shapes drawn on photographs, with known masks, and small models trained on such images."""

from tests.drawn.models import load

__all__ = ["load"]
