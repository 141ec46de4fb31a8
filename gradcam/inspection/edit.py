"""Edit gradients of layers, parameters or tensors in the backward pass, and compute the gradients of parameters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradcam.errors import GradientError, shorten
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import GradientHook
from gradcam.hooks.containers import list_tensors, map_tensors, version_of
from gradcam.hooks.hooks import Hooks, in_own_pass, refuse_vmap
from gradcam.inspection import selection
from gradcam.inspection.selection import Layers, RunCheck
from gradcam.layers.find import unwrap
from gradcam.options import argument_error

MAX_PLACES_IN_REPR = 3


class Edit:
    """The handle of a gradient edit. The edit is active from the creation of the handle until `remove()`.

    The handle is also a context manager that removes the edit at the end of the context. If the context ends without an
    error, the layers are checked. `LayerError` is raised if the model ran, but a layer did not run. `GradientError` is
    raised if the output of a layer required no gradient. A pattern passes a check if one of its layers does. As with
    PyTorch's own hooks, deleting the handle does not remove the edit.

    Parameters
    ----------
    hooks : Hooks
        The hooks of the edit.
    places : sequence of str
        The names of the edited tensors, layers or parameters.
    run_check : RunCheck, default None
        The checks that run at the end of the context.

    Examples
    --------
    >>> import torch
    >>> from gradcam import inspection
    >>> edit = inspection.edit_gradients(torch.nn.Linear(2, 1), torch.zeros_like, parameters="*")
    >>> edit.is_active
    True
    >>> edit.remove()
    >>> edit.is_active
    False
    """

    def __init__(self, hooks: Hooks, places: Sequence[str], run_check: RunCheck | None = None) -> None:
        self._hooks, self._places, self._run_check = hooks, places, run_check
        self._is_active = True

    @property
    def is_active(self) -> bool:
        """Return True until the edit is removed."""
        return self._is_active

    def remove(self) -> None:
        """Stop editing gradients, also for forward passes that have already run. Further calls have no effect."""
        self._is_active = False
        self._hooks.__exit__()

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        was_active = self._is_active
        self.remove()
        if was_active and kind is None and self._run_check is not None:
            self._run_check.require_runs()
            self._run_check.require_gradients()

    def __repr__(self) -> str:
        more = len(self._places) - MAX_PLACES_IN_REPR
        places = ", ".join(self._places[:MAX_PLACES_IN_REPR]) + (f" and {more} more" if more > 0 else "")
        return f"Edit({places}; {'active' if self._is_active else 'removed'})"


def edit_gradients(
    where: Tensor | nn.Module,
    function: GradientHook,
    *,
    layers: Layers | None = None,
    parameters: str | Sequence[str] | None = None,
) -> Edit:
    """Change gradients in the backward pass by a function, whose result is passed on to all earlier layers.

    The edit is active immediately. An edit ends with `Edit.remove()` or with the `with` block. Several edits of one
    gradient run in the order of their registration. If `inspection.record` records an edited layer, it records the
    edited gradient.

    Parameters
    ----------
    where : Tensor or nn.Module
        A tensor that requires gradients, or a model together with `layers` or `parameters`.
    function : callable
        A function that takes a gradient, and returns a new tensor of the same shape, dtype, layout and device. If it
        returns None, the gradient is unchanged. Sparse gradients stay sparse. With `create_graph=True`, autograd also
        differentiates the function.
    layers : str, nn.Module, or a sequence of them, default None
        The names, patterns or modules of layers. The gradient at the output of each layer is edited, in all later
        passes of this thread. If a layer returns several tensors, the first floating-point tensor is used.
    parameters : str or sequence of str, default None
        The names or patterns of parameters. For each parameter, the function runs once in each backward pass, before
        the gradient is added to ``.grad``.

    Returns
    -------
    Edit
        A handle and context manager.

    Raises
    ------
    GradientError
        If the tensor or a parameter requires no gradient. In the backward pass: if the function's result does not match
        the gradient, or if the function changed the gradient in place (changes through ``.data`` are not detected).
    LayerError
        If a layer or parameter does not exist. In the forward pass: if a layer returns no floating-point tensor.
    ModelError
        If the layers belong to a compiled model.

    Examples
    --------
    >>> import torch
    >>> from gradcam import inspection
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> with inspection.edit_gradients(x, lambda gradient: gradient * 10):
    ...     (x * x).backward()
    >>> x.grad
    tensor(60.)
    """
    if not callable(function):
        raise argument_error(function, "The edit", "a function from a gradient to a gradient or None.", GradientError)
    if isinstance(where, Tensor):
        if layers is not None or parameters is not None:
            raise GradientError(
                "Options layers= and parameters= need a model, not a tensor: pass the model, or leave out these options."
            )
        refuse_vmap(where)
        place = f"the tensor {tuple(where.shape)}"
        if not where.requires_grad:
            raise GradientError(
                f"No gradient reaches {place}: call requires_grad_() on this tensor, or on the inputs it is computed from."
            )
        return _edit_tensors({place: where}, function)
    model = unwrap(where)
    if (layers is None) == (parameters is None):
        raise GradientError("Choose the gradients to edit: pass either layers='layer*.conv1' or parameters='fc*.bias'.")
    if parameters is not None:
        selected = selection.select_parameters(model, parameters)
        return _edit_tensors({f"parameter '{name}'": tensor for name, tensor in selected.items()}, function)
    selection.refuse_compiled(where)
    return _edit_layers(model, layers or (), function)


def _edit_tensors(tensors_by_place: Mapping[str, Tensor], function: GradientHook) -> Edit:
    with _open_hooks() as hooks:
        for place, tensor in tensors_by_place.items():
            hooks.at_gradient(tensor, partial(replace_gradient, place, function))
    return Edit(hooks, list(tensors_by_place))


def _edit_layers(model: nn.Module, layers: Layers, function: GradientHook) -> Edit:
    modules = selection.select_layers(model, layers)
    run_check = RunCheck(model, layers)

    def choose_edit(name: str, activations: Tensor) -> GradientHook | None:
        if in_own_pass():  # Passes that gradcam itself runs are not edited.
            return None
        run_check.note_run(name)
        return partial(replace_gradient, f"layer '{name}'", function)

    def attach_edit(name: str, tensor: Tensor, edit: GradientHook) -> Tensor:
        run_check.differentiable.add(name)
        return hooks.edit_gradient(tensor, edit)

    with _open_hooks() as hooks:
        selection.follow_layers(hooks, modules, choose_edit, attach=attach_edit)
        hooks.after_forward(model, run_check.note_model)
    return Edit(hooks, [f"layer '{name}'" for name in modules], run_check)


@contextlib.contextmanager
def _open_hooks() -> Iterator[Hooks]:
    with contextlib.ExitStack() as context:
        yield context.enter_context(Hooks())
        context.pop_all()


def replace_gradient(place: str, function: GradientHook, gradient: Tensor) -> Tensor | None:
    """Return the gradient that `function` returns, after checks; None if `function` left the gradient unchanged.

    `place` is the name of the edited object in messages. Raises `GradientError` as in `edit_gradients`.
    """
    version, refusal = version_of(gradient), None
    try:
        replacement = function(gradient)
    except RuntimeError as error:
        if not pytorch.message_contains(error, pytorch.IN_PLACE_REFUSALS):
            raise
        refusal = error
    if refusal is not None or version_of(gradient) != version:
        raise GradientError(
            f"The edit at {place} changed the gradient in place, but other tensors may share its memory. Return a new "
            "tensor, such as gradient * 2 instead of gradient.mul_(2)."
        ) from refusal
    if replacement is None:
        return None
    if not isinstance(replacement, Tensor):
        raise GradientError(
            f"The edit at {place} returned {shorten(replacement)}, expected a tensor {_describe(gradient)}, or None to "
            "leave the gradient unchanged."
        )
    if _describe(replacement) != _describe(gradient):
        raise GradientError(
            f"The edit at {place} returned {_describe(replacement)}, expected {_describe(gradient)}, like the gradient."
        )
    return replacement


def _describe(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{str(tensor.layout).removeprefix('torch.')} "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def clip_gradients(
    model: nn.Module, limit: float, *, norm: float | None = None, parameters: str | Sequence[str] = "*"
) -> Edit:
    """Clip the gradient of each parameter, before it is added to ``.grad``.

    Each parameter's gradient is clipped separately, during the backward pass. (To scale all gradients together, call
    ``torch.nn.utils.clip_grad_norm_`` after the backward pass.) With gradient accumulation, the gradient of each
    backward pass is clipped, not the accumulated sum. NaN stays NaN. With `norm`, a single NaN makes all values of the
    gradient NaN, and infinite values become NaN.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    limit : float
        The largest allowed absolute value or, with `norm`, the largest allowed p-norm. A positive number.
    norm : float, default None
        None clamps every value to [-limit, limit]. With a number p, such as 2.0 or math.inf, each gradient whose p-norm
        exceeds `limit` is scaled down until its p-norm equals `limit`.
    parameters : str or sequence of str, default "*"
        Names and patterns of parameters. A pattern skips parameters that require no gradient.

    Returns
    -------
    Edit
        A handle and context manager. Its `remove()`, or the end of its `with` block, stops the clipping.

    Raises
    ------
    GradientError
        If the limit is not a positive, finite number, or if the norm is not a positive number, `math.inf` or None. Also
        as in `edit_gradients`.

    Examples
    --------
    >>> import torch
    >>> from gradcam import inspection
    >>> model = torch.nn.Linear(2, 1)
    >>> with inspection.clip_gradients(model, 0.5):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad
    tensor([[0.5000, 0.5000]])
    """
    if not _is_positive(limit) or math.isinf(limit):
        raise argument_error(limit, "The limit", "a positive, finite number.", GradientError)
    if norm is not None and not _is_positive(norm):
        raise argument_error(norm, "The norm", "a positive number such as 2.0, math.inf, or None.", GradientError)
    clip = partial(_clip, limit=float(limit), norm=None if norm is None else float(norm))
    return edit_gradients(model, clip, parameters=parameters)


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float, np.floating, np.integer)) and type(value) is not bool and bool(value > 0)


def _clip(gradient: Tensor, limit: float, norm: float | None) -> Tensor:
    # A sparse tensor may store several values for one index. `coalesce` adds these values before they are clipped.
    if gradient.layout == torch.sparse_coo:
        # Write the clipped values to a clone. Constructing a new sparse tensor would cause a warning in PyTorch 2.11.
        clone = gradient.coalesce().clone()
        clone._values().copy_(_clip(clone._values(), limit, norm))
        return clone
    if norm is None:
        if gradient.is_complex():
            return torch.view_as_complex(_clip(torch.view_as_real(gradient), limit, norm))
        # `clamp` rejects a limit that is too large for half precision.
        limit = min(limit, torch.finfo(gradient.dtype).max)
        return gradient.clamp(-limit, limit)
    if not gradient.numel():
        return gradient  # An empty tensor has no infinity norm.
    # In float32, the squares of large values would overflow. MPS has no float64.
    wide_dtype = torch.promote_types(gradient.dtype, torch.float32 if gradient.device.type == "mps" else torch.float64)
    gradient_norm = torch.linalg.vector_norm(gradient, norm, dtype=wide_dtype)
    # In float16, a very small factor would become zero.
    wide_gradient = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return (wide_gradient * (limit / gradient_norm.clamp(min=limit))).to(gradient.dtype)


class ParameterAliases(TorchFunctionMode):
    """A mode in which this thread computes with aliases of parameters: leaf tensors that share the parameters' memory.

    The parameters themselves, and their `requires_grad`, do not change, so other threads may use and train them at the
    same time. `on_use(parameter)` is called whenever a parameter is an argument of an operation. TorchScript and custom
    `autograd.Function`s use the parameter itself, not its alias. If the parameter is not frozen, the gradient at the
    parameter is then added to the gradient at the alias.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], on_use: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._on_use = on_use
        self._aliases: dict[int, tuple[nn.Parameter, Tensor]] = {}
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                # Autograd rejects inference tensors, so an inference tensor is copied.
                alias = (parameter.clone() if parameter.is_inference() else parameter).detach().requires_grad_()
                self._aliases[id(parameter)] = (parameter, alias)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [self._aliases[id(tensor)] for tensor in list_tensors((args, kwargs)) if id(tensor) in self._aliases]
        for parameter, _ in used:
            self._on_use(parameter)
        if used:
            args, kwargs = map_tensors((args, kwargs), lambda value: self._aliases.get(id(value), (value, value))[1])
        return function(*args, **kwargs)

    def differentiate(self, score: Tensor, other_leaves: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the gradients of a scalar score at all parameters that affect the score, without changing ``.grad``.

        The backward pass also extends to `other_leaves`, so that gradient hooks between these leaves and the score run.
        The gradients at `other_leaves` are not returned.
        """
        targets = list(self._aliases.values())  # (parameter, leaf that shares its memory)
        parameters = [parameter for parameter, _ in targets]
        targets += [(leaf, leaf) for leaf in parameters if leaf.requires_grad and not leaf.is_inference()]
        # Pass graph edges to `torch.autograd.grad`. With tensors as arguments, PyTorch would switch this mode (`self`)
        # off during the backward pass. The mode must stay on, because checkpoints recompute a part of the forward pass
        # in the backward pass.
        edges = [pytorch.find_edge(leaf) for leaf in (*(leaf for _, leaf in targets), *other_leaves)]
        with self:
            gradients = pytorch.differentiate_edges(score, edges)
        sums: dict[nn.Parameter, Tensor] = {}
        for (parameter, _), gradient in zip(targets, gradients):
            if gradient is not None:
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        return sums
