"""Whether something can be fetched, asked before a library tries it over and over."""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from gradcam.errors import ModelError

PATIENCE = 5.0  # seconds
HUB = "https://huggingface.co"
WITHOUT = "The model 'efficientnet_lite0' needs none of this."


def reason_unreachable(url: str) -> str | None:
    """Why there is no answer from where `url` points, None if there is one, whatever it says."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE):
            return None
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in (404, 407, 410) else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def hub_address() -> str:
    """Where Hugging Face's files are fetched from, as its own library finds that."""
    return os.environ.get("HF_ENDPOINT", HUB)


def fetch(url: str, path: Path, hash_prefix: str | None) -> None:
    """Download to `path`, all of it or nothing. Raises `ModelError` with what to do where that fails."""
    import torch

    reason = reason_unreachable(url)
    if reason is None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix, progress=sys.stderr.isatty())
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
        else:
            return
    raise ModelError(
        f"The weights cannot be fetched ({reason}). Download {url} on another computer and put it at {path}, or anywhere, "
        f"and give it with --weights FILE (weights= in Python). {WITHOUT}"
    )
