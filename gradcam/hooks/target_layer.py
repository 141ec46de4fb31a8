"""The pair of hooks at the heart of the package: activations from the forward pass, gradients from the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import LayerError, ModelError, join_names, shorten, warn
from gradcam.hooks import autograd as gradients
from gradcam.hooks.hooks import Given, Hooks, OtherWay, can_exchange, exchange, is_owned
from gradcam.hooks.nested import LayerInput, floating_by_keys, replace_tensor, take_inputs, tensors, version_of
from gradcam.hooks.preserve import IN_FLOATS, is_in_8_bits, is_inner_look, recording_off


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

    def __init__(
        self, module: nn.Module, *, name: str | None = None, keys: Sequence[str] = (), run: int | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise LayerError(f"The layer is {shorten(module)}, expected a torch.nn.Module, such as model.layer4.")
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                "The layer is a TorchScript module, whose output a hook cannot replace: use the Python model that it was "
                "made from."
            )
        self.name = name or type(module).__name__
        self._module, self._keys, self._run = module, tuple(keys), run
        self._passage = nn.Identity()
        self._context: contextlib.ExitStack | None = None
        self.ran_unrecorded = False  # so does the first layer to run; the next does if the model switched recording off
        self._runs = 0
        self._inputs: list[LayerInput] = []
        self._is_in_8_bits = False
        self._given: list[str] = []  # the keys of all that the layer gave
        self._recorded: dict[tuple[str, ...], Tensor] = {}
        self._versions: list[int] = []
        self._other_ways: list[OtherWay] = []
        self._given_on: list[Given] = []
        self._gradients: Tensor | None = None

    def __enter__(self) -> TargetLayer:
        if self._context is not None:
            raise LayerError(f"Layer '{self.name}' is recorded already: make another TargetLayer to nest them.")
        if torch.is_inference_mode_enabled():
            raise ModelError(
                "TargetLayer cannot record inside torch.inference_mode(): use torch.no_grad() there, "
                "or gradcam.explain(), which leaves that mode by itself."
            )
        is_training = torch.is_grad_enabled() and self._module.training
        if is_training and any(it.requires_grad for it in self._module.parameters()):
            warn(
                f"Layer '{self.name}' is in training mode, and nothing before it is recorded: a loss computed here trains "
                "only what is behind it. Call model.eval() to explain; gradcam.inspection.record() looks at training."
            )
        with contextlib.ExitStack() as context:
            context.enter_context(recording_off())  # until the layer has run
            context.callback(self._close_other_ways)
            hooks = context.enter_context(Hooks())
            self._is_others_run = is_inner_look()
            hooks.before_forward(self._module, self._keep_inputs)
            hooks.after_forward(self._module, self._keep_activations)
            hooks.after_backward(self._passage, self._keep_gradients)
            self._context = context.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()

    @property
    def activations(self) -> Tensor:
        """The layer's output as it left the layer; of several, the first floating tensor.

        Raises `LayerError` where the layer did not run, ran more than once, or gave no floating tensor.
        """
        return next(iter(self.recorded.values()))

    @property
    def recorded(self) -> dict[tuple[str, ...], Tensor]:
        """Every floating tensor that the layer gave, by the keys and indices that lead to it. Raises as `activations`."""
        if self._runs == 0:
            raise LayerError(
                f"Layer '{self.name}' did not run in the forward pass: choose one on the way from the input to the score. "
                "(Hooks are skipped in modules that run compiled, and in modules whose forward() is called directly.)"
            )
        if self._run is None and self._runs > 1:
            raise LayerError(
                f"Layer '{self.name}' ran {self._runs} times before the backward pass: name one of its runs, "
                f"'{self.name}#0' to '#{self._runs - 1}', or a layer that runs once, such as the block around it."
            )
        if self._run is not None and self._runs <= self._run:
            raise LayerError(f"Layer '{self.name}' ran {self._runs} time(s): its runs are counted from 0.")
        if not self._recorded:
            if self._keys:
                there = f"there are {join_names(self._given)}" if self._given else "its output is one tensor"
                raise LayerError(
                    f"Layer '{self.name}' has no floating-point tensor under '{':'.join(self._keys)}': {there}."
                )
            if self._is_in_8_bits:
                raise LayerError(f"Layer '{self.name}' gives {IN_FLOATS}")
            raise no_floating_tensor([self.name])
        for tensor, version in zip(self._recorded.values(), self._versions):
            if version_of(tensor) != version:
                raise LayerError(
                    f"What layer '{self.name}' gave is changed in place behind it, under another name: choose a layer "
                    "behind that, or explain this one alone."
                )
        return self._recorded

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
        gradient is float32: on its way it is scaled, because small values would be lost. Raises `LayerError` if the score
        does not depend on the layer, `ModelError` if recording was off or a plain `backward()` has used up the graph.
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
        self.require_only_way(score)
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

    @property
    def gave_several(self) -> bool:
        """Whether there is more than one tensor to choose from."""
        return len(self._recorded) > 1

    def let_go(self) -> None:
        """Take what was given out of the graph, for whoever still holds it: there is no backward pass any more."""
        while self._given_on:
            self._given_on.pop().let_go()

    def require_only_way(self, score: Tensor) -> None:
        """Raises `LayerError` where the score depends on the layer's output by a way that is not recorded."""
        if self._other_ways and any(way.is_among(gradients.leaves(score)) for way in self._other_ways):
            raise LayerError(
                f"What layer '{self.name}' gave is also read as another view of the same memory, whose gradient is not "
                "recorded: choose a layer before or behind it."
            )

    def _keep_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = None
        if not self._is_others_run():  # it may change what came in place, and the model may go on using that
            self._inputs, arguments = take_inputs(args, kwargs)
        return arguments

    def _keep_activations(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._is_others_run():  # an explanation between the forward pass and its backward pass, say
            return None
        if self._gradients is not None:  # a run after a backward pass begins a new forward pass
            self._runs, self._gradients = 0, None
        self._runs += 1
        inputs, self._inputs = self._inputs, []
        found: dict[tuple[str, ...], Tensor] = {}
        if self._runs == (self._run or 0) + 1:
            self._recorded, self._versions = {}, []
            self._close_other_ways()
            self._given_on.clear()
            self.ran_unrecorded = not torch.is_grad_enabled()
            given, self._is_in_8_bits = floating_by_keys(output), is_in_8_bits(output)
            self._given = [":".join(keys) for keys in given if keys]
            found = {keys: tensor for keys, tensor in given.items() if keys[: len(self._keys)] == self._keys}
        for each in inputs:
            if each.is_changed and not any(each.given is tensor for tensor in found.values()):
                each.replace(each.given)
        handed_on = output
        for keys, tensor in found.items():
            goes_on = self._record(keys, tensor, inputs, output)
            handed_on = handed_on if goes_on is tensor else replace_tensor(handed_on, tensor, goes_on)
        return None if handed_on is output else handed_on

    def _record(self, keys: tuple[str, ...], tensor: Tensor, inputs: list[LayerInput], output: Any) -> Tensor:
        """Keep what the layer gave; gives what goes on, which is the same object wherever that can be."""
        refuse_vmap(tensor)
        torch.set_grad_enabled(True)
        source = next((each for each in inputs if each.given is tensor), None)
        is_changed = source is not None and source.is_changed
        # Dropout in evaluation mode and Identity return their input, which may be changed in place later, and which the
        # model goes on using as what came to the layer, not as what left it.
        is_shared = _shares_storage(tensor, [each.given for each in inputs])
        is_kept = is_owned(tensor, self._module) or (source is not None and not is_changed)
        is_free = not is_kept and can_exchange(tensor)
        is_view = tensor._is_view()
        if tensor.requires_grad:  # a TargetLayer further up is open: a new leaf would cut its gradient off
            start = tensor.clone() if is_shared else tensor
        else:
            start = (tensor.detach() if is_free and not is_shared else tensor.detach().clone()).requires_grad_()
        handed_on = self._passage(start).clone(memory_format=_format_of(start))
        if is_free:
            memory = tensor._base if is_view and not (is_shared or tensor.requires_grad) else None
            self._given_on.append(exchange(tensor, handed_on))
            start, handed_on = handed_on if start is tensor else start, tensor
            others = [*self._module.buffers(), *floating_by_keys(output).values()]
            if memory is not None and _is_free(memory) and not _shares_storage(memory, others):
                self._other_ways.append(OtherWay(memory))  # of this pass alone
        elif not (is_kept or is_view or tensor.requires_grad):
            handed_on = tensor.copy_(handed_on)  # and PyTorch raises an error where somebody reads a view of it
        if source is not None and is_changed:
            handed_on = source.replace(handed_on)  # has to lead to the gradient under its old name as well
        self._recorded[keys] = start
        self._versions.append(version_of(start))
        return handed_on

    def _close_other_ways(self) -> None:
        while self._other_ways:
            self._other_ways.pop().close()

    def _keep_gradients(self, grad_output: tuple[Tensor | None, ...]) -> None:
        self._gradients = grad_output[0]


def _format_of(tensor: Tensor) -> torch.memory_format:
    # Channels last by name where it is so: of one image a view's strides may be read as those of another order, and
    # PyTorch's batch norm in evaluation mode then gives a gradient whose channels are mixed up.
    by_name = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    is_plain = by_name is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=by_name)
    return torch.preserve_format if by_name is None or is_plain else by_name


def _shares_storage(tensor: Tensor, others: Any) -> bool:
    address = tensor.untyped_storage().data_ptr()
    dense = (other for other in tensors(others) if other.layout == torch.strided)
    return any(other.untyped_storage().data_ptr() == address for other in dense)


def _is_free(memory: Tensor) -> bool:
    return memory.is_leaf and not (memory.requires_grad or isinstance(memory, nn.Parameter))


def no_floating_tensor(layers: Iterable[str]) -> LayerError:
    """The error for layers whose output holds nothing that a gradient can be taken at."""
    return LayerError(
        f"Layer {join_names(layers)} gave no floating-point tensor: choose a layer whose output is one, or holds one."
    )


def refuse_vmap(tensor: Tensor) -> None:
    """Raises `ModelError` for what only torch.func sees, and takes back."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ModelError(
            "The model runs under torch.func (vmap, grad, jvp), where a hook cannot keep what it sees: "
            "call the model, or gradcam.explain(), on the whole batch instead."
        )
