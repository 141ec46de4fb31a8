"""Weights from files of any trainer: read without running what is in them, fitted to a model's names, loaded."""

from gradcam.models.checkpoints.fit import count_classes, load_weights
from gradcam.models.checkpoints.read import Checkpoint, read_checkpoint

__all__ = ["Checkpoint", "count_classes", "load_weights", "read_checkpoint"]
