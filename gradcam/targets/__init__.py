"""Targets to explain: classes, boxes, masks, keypoints, sentences, words, reference images, or output functions."""

from __future__ import annotations

from gradcam.targets.base import Instance
from gradcam.targets.boxes import Box, MissedBox
from gradcam.targets.classes import ClassTarget
from gradcam.targets.keypoints import Keypoint
from gradcam.targets.likeness import Like
from gradcam.targets.masks import Mask
from gradcam.targets.text import Text
from gradcam.targets.words import Token

__all__ = ["Box", "ClassTarget", "Instance", "Keypoint", "Like", "Mask", "MissedBox", "Text", "Token"]
