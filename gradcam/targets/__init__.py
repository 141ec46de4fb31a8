"""What is explained: classes, boxes, masks, keypoints, sentences, words, other pictures, or any function of the output."""

from __future__ import annotations

from gradcam.targets.base import Instance
from gradcam.targets.boxes import Box, MissedBox
from gradcam.targets.classes import ClassTarget

__all__ = ["Box", "ClassTarget", "Instance", "MissedBox"]
