"""What browsers are shown: templates, static files and their policy, and the page of one picture, alive without a server."""

from __future__ import annotations

from gradcam.web.page import Page

__all__ = ["Page"]
