"""Write the views of a report, as a run does."""

from pathlib import Path
from typing import Any

from gradcam.report.views import draw_views
from gradcam.storage.disk import remove_empty
from gradcam.storage.output import DiskWriter


def write_views(folder: Path, stem: str, picture: Any, overlays: Any, *, temporary: Path | None = None) -> None:
    views, partial = draw_views(stem, picture, overlays), temporary or folder / ".partial"
    partial.mkdir(exist_ok=True)
    try:
        DiskWriter(folder, partial).write({}, views)
    finally:
        if temporary is None:
            remove_empty(partial)
