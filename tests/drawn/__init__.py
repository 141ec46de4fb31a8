"""Pictures of drawn shapes on photographs, whose truth is known, and small models that were trained on such."""

from tests.drawn.models import load

__all__ = ["load"]
