"""The gallery: a static folder for browsing the results of many images, which opens from disk without a server."""

from __future__ import annotations

from gradcam.report.gallery import write_report
from gradcam.report.views import draw_views

__all__ = ["draw_views", "write_report"]
