"""OpenCV, or the reason why there is none."""

from __future__ import annotations

from gradcam.errors import GradcamError

try:
    import cv2
except ImportError as error:
    raise GradcamError(
        f"OpenCV cannot be loaded ({error}). On a machine without a screen, install the build that needs none in its place: "
        "pip uninstall --yes opencv-python && pip install opencv-python-headless"
    ) from error

__all__ = ["cv2"]
