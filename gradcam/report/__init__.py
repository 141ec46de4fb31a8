"""The gallery: one static folder that opens from disk, to look through what was found in many pictures."""

from __future__ import annotations

from gradcam.report.pages import write_report
from gradcam.report.views import draw_views

__all__ = ["draw_views", "write_report"]
