"""OpenCV, or the reason why there is none."""

from __future__ import annotations

from gradcam.errors import GradcamError

try:
    import cv2
except ImportError as error:
    raise GradcamError(
        f"OpenCV cannot be loaded ({error}). On a machine without a display, install the headless build instead: "
        "pip uninstall --yes opencv-python && pip install opencv-python-headless"
    ) from error

__all__ = ["cv2"]
