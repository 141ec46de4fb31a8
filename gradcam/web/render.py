"""Render templates, and embed the static files that the gallery and all pages use."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from gradcam.errors import OutputError
from gradcam.images.files import write_atomically


def render(template: str, **values: Any) -> str:
    """Render a template of gradcam with the values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    settings: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("gradcam.web"), undefined=StrictUndefined, **settings)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(template).render(values)


def render_standalone(
    template: str, *, styles: tuple[str, ...], scripts: dict[str, tuple[str, ...]], **values: Any
) -> str:
    """Render a page that needs no other file.

    The static files are embedded in the page. The files of each entry of `scripts` are joined to one inline script. The
    page's content security policy allows no other style or script.
    """
    parts = {"style": styles, **scripts}
    content: dict[str, Any] = {name: "".join(map(read_static, files)) for name, files in parts.items()}
    content |= {f"{name}_hash": hash_inline(content[name]) for name in parts}
    return render(template, **values, **content)


def read_static(name: str) -> str:
    """Return the text of a static file."""
    return (resources.files("gradcam.web") / "static" / name).read_text("utf-8")


def write_page(path: Path, text: str) -> None:
    """Write a page, completely or not at all. Raise `OutputError` if the file cannot be written."""
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path}: cannot be written ({reason[:1].lower()}{reason[1:]})") from error


def to_data_url(data: bytes, kind: str = "image/jpeg") -> str:
    """Return a data URL that contains a file of the MIME type `kind`."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def hash_inline(text: str) -> str:
    """Return the SHA-256 hash of an inline style or script, for the page's content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
