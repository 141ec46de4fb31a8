"""Changing gradients on their way back: at layers, at parameters, at single tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType

from torch import Tensor, nn

from gradcam.errors import GradientError, join_names, shorten
from gradcam.hooks import Hooks
from gradcam.inspection.attendance import Attendance
from gradcam.inspection.replacement import replace_gradient
from gradcam.inspection.runs import follow_layers
from gradcam.inspection.selection import Layers, refuse_compiled, select_layers, select_parameters
from gradcam.isolation import is_undisturbed
from gradcam.layers import unwrap
from gradcam.passages import GradientHook
from gradcam.target_layer import refuse_vmap

MOST_NAMED = 3  # places in an edit's repr


class Edit:
    """The handle of an edit of gradients, which is there from the call that made it until `remove()`.

    As a context manager it is removed at the end. Where that end is clean (no error under way), it raises `LayerError`
    for a layer that never ran although the model did, and `GradientError` for one at which no gradient can ever have
    come, since nothing before it requires one; of a pattern's layers one is enough. An edit that is only dropped stays,
    like the handles of PyTorch's own hooks.
    """

    def __init__(self, hooks: Hooks, places: Sequence[str], attendance: Attendance | None = None) -> None:
        self._hooks = hooks
        self._places = places
        self._attendance = attendance
        self._is_active = True

    @property
    def is_active(self) -> bool:
        """Whether it still changes gradients."""
        return self._is_active

    def remove(self) -> None:
        """From now on no gradient is changed, in passes whose forward part is over neither. A second time does nothing."""
        self._is_active = False
        self._hooks.__exit__(None, None, None)

    def __enter__(self) -> Edit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        was_active = self._is_active
        self.remove()
        if was_active and kind is None and self._attendance is not None:
            self._attendance.require_runs()
            self._attendance.require_gradients()

    def __repr__(self) -> str:
        more = len(self._places) - MOST_NAMED
        places = ", ".join(self._places[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"Edit({places}; {'active' if self._is_active else 'removed'})"


def edit_gradients(
    where: Tensor | nn.Module,
    function: GradientHook,
    *,
    layers: Layers | None = None,
    parameters: str | Sequence[str] | None = None,
) -> Edit:
    """Let `function(gradient)` change gradients in the backward pass: what it returns replaces the gradient and flows on.

        edit_gradients(tensor, lambda gradient: gradient + 2)
        edit_gradients(model, lambda gradient: gradient.clamp(min=0), layers="layer*.conv1")
        with edit_gradients(model, torch.zeros_like, parameters="fc*.bias"):
            loss.backward()

    `where`: a tensor that requires gradients, or a model with one of these: `layers`, at whose outputs (the first floating
    tensor of several) the gradient is edited in every pass that this thread makes from now on, those of gradcam itself left
    out; `parameters`, whose gradient is edited, once in each backward pass, before it is added to `.grad`. Names and
    patterns: as in `select_layers`, `select_parameters`.
    `function` gets the gradient as it came, and returns a new tensor of the same shape, dtype, layout and device, or None
    to leave it. Sparse gradients come sparse. With `create_graph=True` it is differentiated like the rest.

    Several edits of one place run in the order of their registration, and a recorder of that layer sees what they made.
    The edit is there at once; `Edit.remove()` or the end of a `with` takes it back.

    Raises `GradientError`, `LayerError` for places that do not exist or to which no gradient comes, `ModelError` for layers
    of compiled models. The backward pass raises `GradientError`, as itself, where the function returns what cannot take the
    gradient's place, and where it changed the gradient in place, which would reach other tensors too. (PyTorch's counter
    tells; it does not see what is written through `.data` or `.numpy()`.) The forward pass raises `LayerError` where
    a layer gives no floating tensor.
    """
    if not callable(function):
        raise GradientError(
            f"The edit is {shorten(function)}, expected a function from a gradient to a gradient or None."
        )
    if isinstance(where, Tensor):
        if layers is not None or parameters is not None:
            raise GradientError("A single tensor has no layers and no parameters: pass the model, or leave them out.")
        return _edit_tensor(where, function)
    model = unwrap(where)
    if (layers is None) == (parameters is None):
        raise GradientError(
            "Say where in the model gradients are edited: layers='layer*.conv1' or parameters='fc*.bias', one of the two."
        )
    if parameters is not None:
        return _edit_parameters(model, parameters, function)
    refuse_compiled(where)
    return _edit_layers(model, layers or (), function)


def _edit_tensor(tensor: Tensor, function: GradientHook) -> Edit:
    place = f"the tensor {tuple(tensor.shape)}"
    refuse_vmap(tensor)
    if not tensor.requires_grad:
        raise GradientError(
            f"No gradient comes to {place}: call requires_grad_() on it, or on what it is made from, before it is made."
        )
    with contextlib.ExitStack() as context:
        hooks = context.enter_context(Hooks())
        hooks.at_gradient(tensor, _checked(place, function))
        context.pop_all()
    return Edit(hooks, [place])


def _edit_parameters(model: nn.Module, parameters: str | Sequence[str], function: GradientHook) -> Edit:
    chosen = select_parameters(model, parameters)
    with contextlib.ExitStack() as context:
        hooks = context.enter_context(Hooks())
        for name, parameter in chosen.items():
            hooks.at_gradient(parameter, _checked(f"parameter '{name}'", function))
        context.pop_all()
    return Edit(hooks, [f"parameter {join_names([name])}" for name in chosen])


def _edit_layers(model: nn.Module, layers: Layers, function: GradientHook) -> Edit:
    chosen = select_layers(model, layers)
    attendance = Attendance(model, layers)
    edits = {name: _checked(f"layer '{name}'", function) for name in chosen}
    names = {edit: name for name, edit in edits.items()}

    def look(name: str, activations: Tensor) -> GradientHook | None:
        if is_undisturbed():  # what gradcam runs itself is none of the user's passes
            return None
        attendance.note_run(name)
        return edits[name]

    def pass_on(tensor: Tensor, edit: GradientHook) -> Tensor:
        attendance.note_gradient(names[edit])
        return hooks.edit_gradient(tensor, edit)

    with contextlib.ExitStack() as context:
        hooks = context.enter_context(Hooks())
        follow_layers(hooks, chosen, look, pass_on=pass_on)
        hooks.after_forward(model, lambda *_: None if is_undisturbed() else attendance.note_model())
        context.pop_all()
    return Edit(hooks, [f"layer '{name}'" for name in chosen], attendance)


def _checked(place: str, function: GradientHook) -> GradientHook:
    return lambda gradient: replace_gradient(place, function, gradient)
