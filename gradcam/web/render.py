"""Templates and static files, which the gallery and all pages share; and a page in one file, with its policy."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from gradcam.errors import OutputError
from gradcam.images.files import write_whole


def render(template: str, **values: Any) -> str:
    """One of our templates, with these values in it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    settings: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("gradcam.web"), undefined=StrictUndefined, **settings)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(template).render(values)


def render_whole(template: str, *, styles: tuple[str, ...], scripts: dict[str, tuple[str, ...]], **values: Any) -> str:
    """A page that needs no other file: static files are in it, each of `scripts` made of several, and the page's policy
    heeds no other style or script."""
    parts = {"style": styles, **scripts}
    content: dict[str, Any] = {name: "".join(map(read_static, files)) for name, files in parts.items()}
    content |= {f"{name}_hash": _hash(content[name]) for name in parts}
    return render(template, **values, **content)


def read_static(name: str) -> str:
    """The text of a static file."""
    return (resources.files("gradcam.web") / "static" / name).read_text("utf-8")


def write_page(path: Path, text: str) -> None:
    """Write a page whole. Raises `OutputError` where that cannot be done."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{path}: cannot be written ({reason[:1].lower()}{reason[1:]})") from error


def to_source(data: bytes, kind: str = "image/jpeg") -> str:
    """A file as an address that holds all of it."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _hash(text: str) -> str:
    """What the page's policy says of a style or script that is in it, so that no other one is heeded."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
