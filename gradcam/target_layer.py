"""The pair of hooks at the heart of the package: activations from the forward pass, gradients from the backward pass."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gradcam import gradients
from gradcam.errors import LayerError, ModelError, shorten
from gradcam.grad_mode import recording_off
from gradcam.hooks import Hooks
from gradcam.inputs import LayerInput, take_inputs
from gradcam.nested import first_floating, replace_tensor, tensors


class TargetLayer:
    """Records one layer's activations and the gradient of a score with respect to them.

        with gradcam.TargetLayer(model.layer4) as layer:
            output = model(images)
            gradients = layer.backward(output[:, 281].sum())

    Nothing before the layer is recorded for autograd, so that the backward pass runs through the tail of the network
    only: it touches no parameter's `.grad` and needs no parameter that requires gradients. The layer's output goes on as
    a clone, so that operations in place behind it cannot change what was recorded. Several `TargetLayer`s may be open
    at once. When the context ends the hooks are gone and the grad mode is what it was; until then recording stays on from
    the layer's first run, so that each forward pass is best given a context of its own.

    Raises `ModelError` where recording is impossible: inside `torch.inference_mode()`, on a TorchScript module, under
    `torch.func.vmap`.
    """

    # How it works. A full backward hook on the layer itself would make the layer's output a view, which the in-place
    # operation that often follows must not modify (pytorch issue 61519). So the forward hook keeps the output as a leaf
    # that requires gradients, switches recording on for what follows, and sends the leaf through a private identity
    # module, which carries the full backward hook; a clone of that is what the rest of the model sees.

    def __init__(self, module: nn.Module, *, name: str | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise LayerError(f"The layer is {shorten(module)}, expected a torch.nn.Module, such as model.layer4.")
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                "The layer is a TorchScript module, whose output a hook cannot replace: "
                "use the Python model that it was made from."
            )
        self.name = name or type(module).__name__
        self._module = module
        self._passage = nn.Identity()
        self._context: contextlib.ExitStack | None = None
        self.ran_unrecorded = False  # so does the first layer to run; the next does if the model switched recording off
        self._runs = 0
        self._inputs: list[LayerInput] = []
        self._activations: Tensor | None = None
        self._gradients: Tensor | None = None

    def __enter__(self) -> TargetLayer:
        if self._context is not None:
            raise LayerError(f"Layer '{self.name}' is recorded already: make another TargetLayer to nest them.")
        if torch.is_inference_mode_enabled():
            raise ModelError(
                "TargetLayer cannot record inside torch.inference_mode(): use torch.no_grad() there, "
                "or gradcam.explain(), which leaves that mode by itself."
            )
        with contextlib.ExitStack() as context:
            context.enter_context(recording_off())  # until the layer has run
            hooks = context.enter_context(Hooks())
            hooks.before_forward(self._module, self._keep_inputs)
            hooks.after_forward(self._module, self._keep_activations)
            hooks.after_backward(self._passage, self._keep_gradients)
            self._context = context.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()

    @property
    def activations(self) -> Tensor:
        """The layer's output as it left the layer; of several, the first floating tensor.

        Raises `LayerError` where the layer did not run, ran more than once, or gave no floating tensor.
        """
        if self._runs == 0:
            raise LayerError(
                f"Layer '{self.name}' did not run in the forward pass: choose one on the way from the input to the score. "
                "(Hooks are skipped in modules that run compiled, and in modules whose forward() is called directly.)"
            )
        if self._runs > 1:
            raise LayerError(
                f"Layer '{self.name}' ran {self._runs} times before the backward pass: its activations are not one thing; "
                "choose a layer that runs once in a forward pass, such as the block around it."
            )
        if self._activations is None:
            raise LayerError(
                f"Layer '{self.name}' gave no floating-point tensor: choose a layer whose output is one, or holds one."
            )
        return self._activations

    @property
    def gradients(self) -> Tensor:
        """The gradient of the last score at the layer, shaped as `activations`. Raises `LayerError` before there is one."""
        if self._gradients is None:
            raise LayerError(
                f"Layer '{self.name}' has no gradients yet: call layer.backward(score) after the forward pass."
            )
        return self._gradients

    def backward(self, score: Tensor) -> Tensor:
        """The gradient of `score`, a tensor of one value, at the layer: shaped as `activations`, kept as `gradients`.

        May be called again for other scores of the same forward pass. Where the activations or the score are float16 the
        gradient is float32: on its way it is scaled, because small values would be lost.
        Raises `LayerError` if the score does not depend on the layer, `ModelError` if recording was off or the graph has
        been used up by a plain `backward()`.
        """
        if not isinstance(score, Tensor) or score.numel() != 1 or not score.is_floating_point():
            what = f"{score.dtype} {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
            raise LayerError(
                f"The score is {what}, expected a floating tensor of one value: sum it, or pick an element."
            )
        activations = self.activations
        gradients.require_recording(score, [self.name])
        scaled = torch.float16 in (activations.dtype, score.dtype)
        with torch.enable_grad():
            scores = score.reshape(1, 1)
        try:
            ((gradient,),) = gradients.jacobian(scores, [activations], scaled=scaled)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise ModelError(
                "The graph of this forward pass is used up: call score.backward(retain_graph=True) if another follows."
            ) from error
        if gradient is None:
            raise gradients.no_dependence([self.name])
        self._gradients = gradient[0]
        return self._gradients

    def _keep_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # It may change that in place, and the model may go on using it.
        self._inputs, arguments = take_inputs(args, kwargs)
        return arguments

    def _keep_activations(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # A run after a backward pass begins a new forward pass; without one between, the layer ran twice in the same.
        is_next_pass = self._gradients is not None
        self._runs = 1 if is_next_pass else self._runs + 1
        self._gradients = None
        changed = [each for each in self._inputs if each.is_changed]
        inputs, self._inputs = [each.given for each in self._inputs], []
        tensor = first_floating(output)
        if tensor is None or self._runs > 1:
            for each in changed:
                each.replace(each.given)
            return None
        refuse_vmap(tensor)
        # Dropout in evaluation mode and Identity return their input, which may be changed in place later.
        is_shared = _shares_storage(tensor, inputs)
        self.ran_unrecorded = not torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        if tensor.requires_grad:  # a TargetLayer further up is open: a new leaf would cut its gradient off
            self._activations = tensor.clone() if is_shared else tensor
        else:
            self._activations = (tensor.detach().clone() if is_shared else tensor.detach()).requires_grad_()
        handed_on = self._passage(self._activations).clone(memory_format=_format_of(self._activations))
        for each in changed:  # an input that became the output has to lead to the gradient under its old name as well
            replacement = each.replace(handed_on if each.given is tensor else each.given)
            handed_on = replacement if each.given is tensor else handed_on
        return replace_tensor(output, tensor, handed_on)

    def _keep_gradients(self, grad_output: tuple[Tensor | None, ...]) -> None:
        self._gradients = grad_output[0]


def _format_of(tensor: Tensor) -> torch.memory_format:
    """Channels last by name where it is so: of one image, a view's strides may be read as those of another order.

    PyTorch's batch norm in evaluation mode then gives a gradient whose channels are mixed up.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = formats.get(tensor.ndim)
    if channels_last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=channels_last):
        return torch.preserve_format
    return channels_last


def _shares_storage(tensor: Tensor, inputs: Any) -> bool:
    address = tensor.untyped_storage().data_ptr()
    dense = (other for other in tensors(inputs) if other.layout == torch.strided)
    return any(other.untyped_storage().data_ptr() == address for other in dense)


def refuse_vmap(tensor: Tensor) -> None:
    """Raises `ModelError` for what only torch.func sees, and takes back."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ModelError(
            "The model runs under torch.func (vmap, grad, jvp), where a hook cannot keep what it sees: "
            "call the model, or gradcam.explain(), on the whole batch instead."
        )
