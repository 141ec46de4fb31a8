"""The gallery: a static folder, opened from disk, to browse the results of many images."""

from __future__ import annotations

from gradcam.report.gallery import write_report
from gradcam.report.views import draw_views

__all__ = ["draw_views", "write_report"]
