"""Draw the first heatmap of a page for viewers without JavaScript: in the page itself, and as a preview in chats."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, OutputError, shorten
from gradcam.images.read import Pixels, Region
from gradcam.images.write import encode_image, shrink_to_fit

COLORMAP = "turbo"
FIRST_MAP_SIDE = 160  # pixels of the heatmap that is visible without JavaScript
MAX_PREVIEW_SIDE = 1200  # Chats show at most about 1,200 pixels, and ignore files of several megabytes.


def normalise_positive(values: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Return the positive values of a map (h,w), divided by their maximum; None without positive values."""
    maximum = 0 if values is None else values.max(initial=0)
    return None if values is None or not maximum > 0 else (np.maximum(values, 0) / maximum).astype(np.float32)


def encode_first_map(values: NDArray[np.float32] | None, size: tuple[int, int], region: Region) -> bytes | None:
    """Return the positive values of a map (h,w) as a transparent PNG that covers an image; None if there are none.

    `size` is the (height, width) of the image, and `region` its part that the map covers.
    """
    from gradcam.images.draw import compute_colours, resize

    heatmap = normalise_positive(values)
    if heatmap is None:
        return None
    scale = FIRST_MAP_SIDE / max(size)
    height, width = (max(1, round(side * scale)) for side in size)
    top, left, bottom, right = (
        round(edge * scale) for edge in (*region[:2], region[0] + region[2], region[1] + region[3])
    )
    levels = np.rint(resize(heatmap, max(1, bottom - top), max(1, right - left)).clip(0, 1) * 255).astype(np.uint8)
    colours, opacity = compute_colours(COLORMAP, signed=False)
    table = np.concatenate([colours, 127.5 * opacity], 1).round().astype(np.uint8)
    canvas = np.zeros((height, width, 4), np.uint8)
    part = canvas[top : top + len(levels), left : left + levels.shape[1]]
    part[...] = table[levels][: part.shape[0], : part.shape[1]]
    return encode_image(canvas, ".png")


def draw_preview(image: Pixels, values: NDArray[np.float32] | None, region: Region) -> Pixels:
    """Return the overlay of a map's positive values, small enough for the preview in a chat."""
    from gradcam.images.draw import overlay

    heatmap = normalise_positive(values)
    pixels = image if heatmap is None else overlay(image, heatmap, region=region, colormap=COLORMAP, outline=True)
    return shrink_to_fit(pixels, MAX_PREVIEW_SIDE)


def check_address(url: str) -> str:
    """Return the address of a web page. Raise `GradcamError` if it is not an absolute http or https address."""
    try:
        parts = urlsplit(url)
        is_absolute = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # The port or the IPv6 address is malformed.
        is_absolute = False
    if not is_absolute or not url.isprintable() or set(url) & set(' "<>\\^`{|}'):
        raise GradcamError(
            f"{shorten(url)} is not an absolute address: give one such as https://example.org/photo.html."
        )
    return url


def find_addresses(url: str, path: Path) -> dict[str, Any]:
    """Return the addresses of a page and of its preview image. `url` may end in "/"; then the file name is added."""
    address = (
        urljoin(check_address(url), quote(os.fsencode(path.name))) if urlsplit(url).path[-1:] in ("", "/") else url
    )
    return {"url": address, "image_url": urljoin(address, quote(os.fsencode(path.with_suffix(".png").name)))}


def find_preview_file(path: Path) -> Path:
    """Return the file for the preview image beside a page. Raise `OutputError` if it would replace an unrelated file."""
    preview = path.with_suffix(".png")
    if os.path.lexists(preview) and not _is_named(preview, path):
        problem = f"{preview} exists already, and is not the preview of an earlier {path.name}"
        raise OutputError(f"{problem}: choose another name for the page, or remove that file.")
    return preview


def _is_named(preview: Path, path: Path) -> bool:
    """Return whether an earlier page names this preview image."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError):
        return False
    return f'/{quote(os.fsencode(preview.name))}"><meta name="twitter:card"' in text
