"""The log of a run: what happened when, in lines of JSON. Times are here alone, so that the manifest is reproducible."""

from __future__ import annotations

import contextlib
import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

from gradcam.batch.output.disk import LineFile


class Logbook:
    """Appends events; several threads may."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)
        self._lock = threading.Lock()

    def note(self, event: str, details: dict[str, Any]) -> None:
        """Add `{"time": ..., "event": ..., ...}`, the time in ISO 8601 with its offset."""
        fields = {"time": datetime.now().astimezone().isoformat(timespec="milliseconds"), "event": event, **details}
        line = json.dumps(fields, default=str).encode() + b"\n"
        # A log that cannot be written stops no run: what matters is in the manifest, which says so when it cannot.
        with self._lock, contextlib.suppress(OSError, ValueError):  # a closed file's is a ValueError
            self._lines.append(line)

    def close(self) -> None:
        """Close it; what is noted later is lost."""
        with self._lock:
            self._lines.close()
