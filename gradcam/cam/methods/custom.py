"""Make a CAM method from a user's function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

from gradcam.cam.methods.base import ActivationMethod, CurvatureMethod, GradientMethod, Method, check_plain
from gradcam.cam.methods.table import find_in_table
from gradcam.errors import GradcamError, shorten


def method(name: str, *, summary: str, signed: bool = False) -> Callable[[Callable[..., Any]], Method]:
    """Make a CAM method from a function of activations and gradients.

    Wherever a method's name is accepted, you can pass the result instead.

    Parameters
    ----------
    name : str
        The method's name in results and file names. A name may contain letters, digits, "-" and "_".
    summary : str
        A description of the method, in one line.
    signed : bool, default False
        True if negative values of the maps are evidence against the class. The method then supports
        `evidence="negative"` and "signed".

    Returns
    -------
    callable
        A decorator for a pure function. The function has a parameter `activations` (N,C,...). The function may also
        have the parameters `gradients` (N,K,C,...), the gradients of the K scores, and `curvatures` (N,K,C,...), the
        product of the Hessian and the activations. The grid may have any number of axes. Values are float32 or float64.
        The function returns maps (N,K,...), or maps (N,...) if it takes only `activations`. Maps have the dtype and
        device of the activations. Any other parameter needs a default, and becomes an option of `Method.using`.

    Raises
    ------
    GradcamError
        If the name is invalid or already exists, or if the function's parameters do not have the names above.

    Examples
    --------
    >>> import gradcam
    >>> @gradcam.method("mycam", summary="activations times positive gradients")
    ... def mycam(activations, gradients):
    ...     return (activations[:, None] * gradients.clamp(min=0)).sum(2)
    >>> mycam.name
    'mycam'
    """
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII) is None:
        raise GradcamError(f"The method's name is {shorten(name)}, expected letters, digits, '-' and '_'.")
    if find_in_table(name) is not None:
        raise GradcamError(f"A method named {name!r} already exists: choose another name.")

    def to_method(function: Callable[..., Any]) -> Method:
        kind, options = _read_signature(name, function)
        return kind(name, str(summary), None, function, options=options, is_signed=bool(signed))

    return to_method


def _read_signature(name: str, function: Any) -> tuple[type[Method], Mapping[str, Any]]:
    kinds: list[type[Method]] = [ActivationMethod, GradientMethod, CurvatureMethod]
    try:
        parameters = list(signature(function).parameters.values())
    except (TypeError, ValueError):
        raise GradcamError(f"{name} is {shorten(function)}, expected a function with a readable signature.") from None
    options = {item.name: item.default for item in parameters if item.default is not item.empty}
    needs = tuple(parameter.name for parameter in parameters if parameter.name not in options)
    kind = next((kind for kind in kinds if kind.needs == needs), None)
    # The package passes tensors by position, and options by keyword.
    tensor_kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    option_kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    is_supported = all(item.kind in (option_kinds if item.name in options else tensor_kinds) for item in parameters)
    if kind is None or not is_supported:
        forms = " or ".join(f"({', '.join(kind.needs)})" for kind in kinds)
        raise GradcamError(
            f"{name} has the parameters {signature(function)}, expected {forms}, plus options with defaults."
        )
    return kind, check_plain(name, options)
