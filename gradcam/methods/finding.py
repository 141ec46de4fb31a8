"""Methods by their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradcam.choices import SMOOTHINGS
from gradcam.errors import GradcamError, join_names, nearest, shorten
from gradcam.methods.method import Method
from gradcam.methods.table import METHODS

ALIASES = {"chefer": "gradient-rollout"}  # what others call a method


def find_method(method: str | Method) -> Method:
    """The method of that name, or a method itself. Raises `GradcamError` for an unknown one, and offers the nearest.

    Case and hyphens do not count, `++` is understood for `-pp`, and so are `ALIASES`.
    """
    if isinstance(method, Method):
        return method
    name = _plain(method) if isinstance(method, str) else ""
    name = _plain(ALIASES.get(name, name))
    found = next((known for known in METHODS.values() if _plain(known.name) == name), None)
    if found is None:
        raise GradcamError(f"There is no method {shorten(method)}. {offer(name, METHODS)}")
    return found


def offer(
    name: str, known: Iterable[str], otherwise: str = "`gradcam methods` lists them, as gradcam.METHODS does."
) -> str:
    """What to say where nothing has that name: the nearest, if any looks like it, or where methods are listed."""
    offers = nearest(name, known)
    return f"Nearest: {join_names(offers)}." if offers else otherwise


def _plain(name: str) -> str:
    return name.lower().replace("++", "pp").replace("-", "")


def find_methods(methods: Iterable[str | Method]) -> list[Method]:
    """Each of them once. Raises `GradcamError` where one is unknown, and for what is no list of them."""
    is_list = isinstance(methods, Iterable) and not isinstance(methods, str)
    found = {method.name: method for method in map(find_method, methods)} if is_list else {}
    if not found:
        raise GradcamError(f"methods is {shorten(methods)}, expected a list of at least one name.")
    return list(found.values())


def smooth(methods: Sequence[Method], smoothing: str) -> list[Method]:
    """The methods with this smoothing. Raises `GradcamError` for an unknown one, and where a method cannot have it."""
    if not isinstance(smoothing, str) or smoothing not in SMOOTHINGS:
        raise GradcamError(f"smoothing is {shorten(smoothing)}, expected one of {join_names(SMOOTHINGS)}.")
    return [method.smoothed() for method in methods] if smoothing == "eigen" else list(methods)
