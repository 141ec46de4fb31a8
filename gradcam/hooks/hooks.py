"""Hooks on models, the recorder of a target layer, and the per-thread state that marks this package's own passes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradcam.errors import LayerError, ModelError, join_names, shorten, warn
from gradcam.hooks import autograd, containers, pytorch

ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
PreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
MIN_HANDLES_TO_PRUNE = 64  # Above this number of handles, `Hooks` drops the handles of deleted tensors.
_entry_counter = itertools.count()


class Hooks:
    """Hooks on modules and tensors, all removed when the context ends, also after an exception.

    Forward hooks act only in the thread that entered the context, so that several threads may run one model, each with
    its own hooks. Backward hooks act in every thread, because on CUDA autograd calls them from its own threads.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._thread: int | None = None
        self._entry_index = 0  # The number of this context in the order in which `Hooks` contexts were entered.
        self._prune_above = MIN_HANDLES_TO_PRUNE

    def __enter__(self) -> Hooks:
        self._thread = threading.get_ident()
        self._entry_index = next(_entry_counter)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        self._thread = None
        while self._handles:
            self._handles.pop().remove()

    def before_forward(self, module: nn.Module, function: PreHook) -> None:
        """Call `function(module, args, kwargs)` before the module runs; a returned value replaces the arguments."""

        def hook(module: nn.Module, args: tuple[Any, ...], *kwargs_or_nothing: Any) -> Any:
            refuse_compiling()
            return function(module, args, *kwargs_or_nothing) if threading.get_ident() == self._thread else None

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after_forward(self, module: nn.Module, function: ForwardHook, *, repeated: ForwardHook | None = None) -> None:
        """Call `function(module, args, kwargs, output)` after the module ran; a returned value replaces the output.

        When a backward pass recomputes a checkpoint, `repeated` is called instead, in any thread: on CUDA, autograd
        recomputes checkpoints in its own threads.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> Any:
            refuse_compiling()
            # While another thread registers or removes the hook, PyTorch may pass no `kwargs`: it stores the flag
            # `with_kwargs` in a second dictionary, which may not be updated yet.
            if len(kwargs_and_output) == 2:
                if repeated is not None and is_backward_running():
                    return repeated(module, args, *kwargs_and_output)
                if threading.get_ident() == self._thread:
                    return function(module, args, *kwargs_and_output)
            return None

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def after_backward(self, module: nn.Module, function: Callable[[tuple[Tensor | None, ...]], None]) -> None:
        """Call `function(grad_output)` when the gradient of the module's output is computed (a full backward hook)."""
        self._handles.append(module.register_full_backward_hook(lambda module, grad_input, output: function(output)))

    def at_gradient(self, tensor: Tensor, function: autograd.GradientHook) -> None:
        """Call `function(gradient)` when the gradient of a tensor is computed, before it flows further back."""
        # `unserializable_hook` prevents a warning when the tensor is saved. It sets an attribute of the hook. The
        # partial keeps the caller's `function` unchanged.
        self._own(tensor.register_hook(unserializable_hook(partial(function))))

    def observe_gradient(self, tensor: Tensor, function: autograd.GradientHook) -> Tensor:
        """Call `function` with the gradient of a tensor that requires grad, and return the tensor to continue with.

        `function` gets the gradient that `retain_grad()` would show: the sum over all uses, after all edits
        (`edit_gradient`). The gradient belongs to the tensor's present value, even if the tensor is changed in place
        later. If `function` returns a tensor, this tensor replaces the gradient. Views and leaves are cloned, and
        `function` gets the gradient of the clone. For all other tensors, the graph gets no additional node.
        """
        return self._tap(tensor, "observers", function)

    def edit_gradient(self, tensor: Tensor, function: autograd.GradientHook) -> Tensor:
        """Let `function` change the gradient before any observer gets the gradient.

        Edits run in the order in which the contexts of their `Hooks` were entered.
        """
        return self._tap(tensor, "edits", (self._entry_index, function))

    def _tap(self, tensor: Tensor, kind: Literal["observers", "edits"], entry: Any) -> Tensor:
        from gradcam.hooks.taps import find_tap

        tap, tensor = find_tap(tensor)
        entries = getattr(tap, kind)
        handle = RemovableHandle(entries)
        entries[handle.id] = entry
        self._own(handle)
        return tensor

    def _own(self, handle: RemovableHandle) -> None:
        """Add the handle of a short-lived tensor. If there are many handles, drop the handles of deleted tensors."""
        self._handles.append(handle)
        if len(self._handles) > self._prune_above:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._prune_above = max(MIN_HANDLES_TO_PRUNE, 2 * len(self._handles))


def is_backward_running() -> bool:
    """Return whether this thread is inside a backward pass. PyTorch's checkpoints and hooks use the same check."""
    return pytorch.find_backward_task() != -1


def refuse_compiling() -> None:
    """Raise `ModelError` if torch.compile is tracing. If graph breaks are allowed, the call then runs uncompiled."""
    if torch.compiler.is_compiling():
        raise ModelError("Hooks cannot be part of a compiled function: inspect the uncompiled model instead.")


def is_parameter_or_buffer(tensor: Tensor, module: nn.Module) -> bool:
    """Return True if the tensor is a parameter, or a buffer of the module. Such a tensor must not be replaced."""
    # Do not use `module.buffers()`: for a layer with many batch norms, it would take as long as the backward pass.
    # The check whether an object is a parameter is slow, and no plain tensor is one.
    return (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)) or any(
        tensor is buffer
        for part in containers.list_modules(module)
        if part._buffers
        for buffer in part._buffers.values()
    )


class ThreadState(threading.local):
    """Per-thread state: running passes of this package, and the grad modes saved by open contexts, outermost first.

    The passes of a thread are numbered in the order in which they start. `passes` is the number of the last pass that
    has started, and `running` has the numbers of all passes that have not ended.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.running: set[int] = set()
        self.grad_modes: list[list[bool]] = []


thread_state = ThreadState()


def in_own_pass() -> bool:
    """Return True if this thread is inside a pass of this package, not inside the user's own forward pass."""
    return bool(thread_state.running)


def make_inner_pass_check() -> Callable[[], bool]:
    """Return a function that returns whether this thread is inside a pass that has started after this call."""
    passes = thread_state.passes
    return lambda: max(thread_state.running, default=0) > passes


@contextlib.contextmanager
def grad_mode_off() -> Iterator[None]:
    """Turn grad mode off, and restore the caller's mode at the end. Contexts may end in any order.

    `torch.no_grad` would leave grad mode off for good if the outer of two contexts ended first, which can happen when a
    generator is abandoned.
    """
    restore = turn_grad_mode_off()
    try:
        yield
    finally:
        restore()


def turn_grad_mode_off() -> Callable[[], None]:
    """Turn grad mode off, and return the function that restores the mode, as in `grad_mode_off`."""
    saved_modes = thread_state.grad_modes
    saved = [torch.is_grad_enabled()]
    saved_modes.append(saved)
    pytorch.set_grad_mode(False)

    def restore() -> None:
        if saved_modes[-1] is saved:
            pytorch.set_grad_mode(saved[0])
        # The inner context ends later than the outer one. It then has to restore the mode that the outer context saved.
        else:
            inner = next((later for earlier, later in itertools.pairwise(saved_modes) if earlier is saved), [])
            inner[:] = saved
        saved_modes[:] = [mode for mode in saved_modes if mode is not saved]

    return restore


class TargetLayer:
    """Record one layer's activations, and compute the gradient of a score with respect to them.

    Autograd records only the layers after this layer. The backward pass therefore changes no ``.grad``, and also works
    if all parameters are frozen. The layer's output is passed on as a clone, so that later in-place operations cannot
    change the recorded tensor. Several `TargetLayer` contexts may be open at once. Recording stays on from the layer's
    first run to the end of the context: use one context per forward pass.

    Parameters
    ----------
    module : nn.Module
        The layer.
    name : str, default the module's type
        The layer's name in messages.
    keys : sequence of str, default ()
        The keys and indices that select one tensor, if the layer returns several tensors.
    run : int, default None
        The run to record, counted from 0, if the layer runs several times.
    has_backward_hook : bool, default True
        If True, a plain `score.backward()` also sets `gradients`. If False, only the method `backward` sets
        `gradients`.

    Raises
    ------
    LayerError
        If the layer is not a module.
    ModelError
        If recording is impossible, as in `torch.inference_mode()`, for a TorchScript module, or under `torch.func`.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None).eval()
    >>> with gradcam.TargetLayer(model.layer4) as layer:
    ...     output = model(torch.rand(2, 3, 64, 64))
    ...     gradients = layer.backward(output[:, 281].sum())
    >>> layer.activations.shape, layer.gradients is gradients
    (torch.Size([2, 512, 2, 2]), True)
    """

    # A full backward hook on the layer itself would turn the layer's output into a view. PyTorch forbids in-place
    # operations on such a view (pytorch issue 61519), but in-place operations often follow a layer. Instead, the
    # forward hook stores the output as a leaf that requires gradients, and turns grad mode on for the following layers.
    # The forward hook sends the leaf through a private identity module, which carries the full backward hook. The rest
    # of the model gets a clone of the identity's output.

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str | None = None,
        keys: Sequence[str] = (),
        run: int | None = None,
        has_backward_hook: bool = True,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise LayerError(f"The layer is {shorten(module)}, expected a torch.nn.Module, such as model.layer4.")
        if isinstance(module, torch.jit.ScriptModule):
            advice = "use the original Python model."
            raise ModelError(f"The layer is a TorchScript module, whose output a hook cannot replace: {advice}")
        self.name = name or type(module).__name__
        self._module, self._keys, self._run = module, tuple(keys), run
        self._identity = nn.Identity() if has_backward_hook else None
        self._hooks: Hooks | None = None  # The hooks while the context is open.
        # True if grad mode was off when the layer ran. There are two possible causes: no earlier target layer was
        # recording, or the model turned grad mode off.
        self.ran_unrecorded = False
        self._runs = 0
        self._inputs: list[containers.LayerInput] = []
        self._is_in_8_bits = False
        self._output_keys: list[tuple[str, ...]] = []  # The keys of all tensors that the layer returned.
        self._recorded: dict[tuple[str, ...], Tensor] = {}
        self._versions: list[int] = []
        # Tensors that share the output's memory, but have no recorded gradient. A score must not depend on these
        # tensors.
        self._unrecorded: list[weakref.ref[Tensor]] = []
        # The tensors that the hook returned. The references are strong, because PyTorch swaps no tensor that has weak
        # references.
        self._passed_on: list[Tensor] = []
        # Weak references that replace `_passed_on` after the context has ended.
        self._passed_on_refs: list[weakref.ref[Tensor]] = []
        self._gradients: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        from gradcam.renames import read_old_attribute

        return read_old_attribute(self, name)

    def __enter__(self) -> TargetLayer:
        if self._hooks is not None:
            raise self._error("is already recorded: create another TargetLayer to nest contexts.")
        if torch.is_inference_mode_enabled():
            advice = "use torch.no_grad() instead, or call gradcam.explain(), which works in this mode."
            raise ModelError(f"TargetLayer cannot record inside torch.inference_mode(): {advice}")
        is_training = torch.is_grad_enabled() and self._module.training
        if is_training and any(parameter.requires_grad for parameter in self._module.parameters()):
            reason = "no gradient reaches earlier layers: if you train inside `with`, only later layers learn"
            advice = "Call model.eval() to explain, or use gradcam.inspection.record() in training."
            warn(f"Layer '{self.name}' is in training mode, but {reason}. {advice}")
        self._in_inner_pass = make_inner_pass_check()
        self._hooks = Hooks().__enter__()
        self._restore_grad_mode = turn_grad_mode_off()  # Grad mode is off only until the layer has run.
        try:
            self._hooks.before_forward(self._module, self._copy_inputs)
            self._hooks.after_forward(self._module, self._record_output)
            if self._identity is not None:
                self._hooks.after_backward(self._identity, self._store_gradient)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            try:
                hooks.__exit__()
                self._weaken_passed_on()
                self._release_unrecorded()
            finally:
                self._restore_grad_mode()

    @property
    def activations(self) -> Tensor:
        """Return the layer's output (its first floating-point tensor), unchanged by later operations.

        Raises `LayerError` if the layer did not run, ran more than once, or returned no floating-point tensor.
        """
        return next(iter(self.recorded.values()))

    @property
    def recorded(self) -> dict[tuple[str, ...], Tensor]:
        """Return every floating-point tensor that the layer returned, by its keys and indices.

        Raises the errors of `activations`.
        """
        if self._runs == 0:
            reason = "Hooks are skipped in compiled modules, and in modules whose forward() is called directly."
            advice = "choose a layer on the path from the input to the score"
            raise self._error(f"did not run in the forward pass: {advice}. ({reason})")
        if self._run is None and self._runs > 1:
            runs = f"'{self.name}#0' to '#{self._runs - 1}'"
            advice = f"name one of its runs, {runs}, or a layer that runs once, such as the block around it."
            raise self._error(f"ran {self._runs} times before the backward pass: {advice}")
        if self._run is not None and self._runs <= self._run:
            raise self._error(f"ran {self._runs} time(s): runs are counted from 0.")
        if not self._recorded:
            if self._keys:
                available = [":".join(keys) for keys in self._output_keys if keys]
                contents = f"the keys are {join_names(available)}" if available else "the output is one tensor"
                raise self._error(f"has no floating-point tensor under '{':'.join(self._keys)}': {contents}.")
            if self._is_in_8_bits:
                raise self._error(f"gives {containers.QUANTISED_ADVICE}")
            raise autograd.no_floating_tensor_error([self.name])
        for tensor, version in zip(self._recorded.values(), self._versions):
            if not tensor.is_inference() and tensor._version != version:
                advice = "choose a layer after that change, or explain this layer alone."
                reason = "is changed in place later, through another tensor"
                raise LayerError(f"The output of layer '{self.name}' {reason}: {advice}")
        return self._recorded

    @property
    def gradients(self) -> Tensor:
        """Return the gradient of the last score, shaped like `activations`. Raises `LayerError` before `backward`."""
        if self._gradients is None:
            raise self._error("has no gradients yet: call layer.backward(score) after the forward pass.")
        return self._gradients

    def backward(self, score: Tensor) -> Tensor:
        """Compute the gradient of a score at the layer. Call this method again for other scores of the same pass.

        Parameters
        ----------
        score : Tensor
            A floating-point tensor with one value.

        Returns
        -------
        Tensor
            The gradient, shaped like `activations`. The gradient is float32 if the activations or the score are
            float16, because float16 would lose small values.

        Raises
        ------
        LayerError
            If the score does not depend on the layer.
        ModelError
            If gradient recording was off, or a plain `backward()` has already freed the graph.
        """
        if not isinstance(score, Tensor) or score.numel() != 1 or not score.is_floating_point():
            description = f"{score.dtype} {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
            expected = "a floating-point tensor with one value"
            raise LayerError(f"The score is {description}, expected {expected}: sum it, or pick an element.")
        activations = self.activations
        if not score.requires_grad:
            raise autograd.no_gradient_error([self.name])
        scaled = torch.float16 in (activations.dtype, score.dtype)
        with torch.enable_grad():
            scores = score.reshape(1, 1)
        self.require_single_path(score)
        try:
            ((gradient,),) = autograd.jacobian(scores, [activations], scaled=scaled)
        except RuntimeError as error:
            if not pytorch.message_contains(error, pytorch.GRAPH_IS_FREED):
                raise
            advice = "pass retain_graph=True to all but the last backward()."
            raise ModelError(f"The graph of this forward pass is already freed: {advice}") from error
        if gradient is None:
            raise autograd.no_dependence_error([self.name])
        self._gradients = gradient[0]
        return self._gradients

    @property
    def has_several_outputs(self) -> bool:
        """Return True if the layer returned several tensors to choose from."""
        return len(self._recorded) > 1

    def release(self) -> None:
        """Detach the layer's output from the graph. Call this method if no backward pass will follow."""
        self._weaken_passed_on()
        while self._passed_on_refs:
            tensor = self._passed_on_refs.pop()()
            if tensor is not None and tensor.grad_fn is not None and not pytorch.is_view(tensor):
                tensor.detach_()

    def require_single_path(self, score: Tensor) -> None:
        """Raise an error if the score depends on the layer's output through a path that is not recorded.

        Parameters
        ----------
        score : Tensor
            The score, with its autograd graph.

        Raises
        ------
        LayerError
            If the score depends on the layer's output through such a path.
        """
        unrecorded = [tensor for reference in self._unrecorded if (tensor := reference()) is not None]
        if unrecorded and any(leaf is tensor for leaf in autograd.list_leaves(score) for tensor in unrecorded):
            reason = "is also read through another view of its memory, whose gradient is not recorded"
            raise LayerError(f"The output of layer '{self.name}' {reason}: choose an earlier or a later layer.")

    def _error(self, text: str) -> LayerError:
        return LayerError(f"Layer '{self.name}' {text}")

    def _copy_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = None
        # Store the inputs: the layer may change an input in place, and the model may use this input afterwards.
        if not self._in_inner_pass():
            self._inputs, arguments = containers.copy_inputs(args, kwargs)
        return arguments

    def _record_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Ignore passes that started inside this context, such as an explanation during a training step.
        if self._in_inner_pass():
            return None
        if self._gradients is not None:  # The first run after a backward pass starts a new forward pass.
            self._runs, self._gradients = 0, None
        self._runs += 1
        inputs, self._inputs = self._inputs, []
        returned: dict[tuple[str, ...], Tensor] = {}
        recorded: dict[tuple[str, ...], Tensor] = {}
        if self._runs == (self._run or 0) + 1:
            self._recorded, self._versions = {}, []
            self._release_unrecorded()
            self._passed_on.clear()
            self._passed_on_refs.clear()
            self.ran_unrecorded = not torch.is_grad_enabled()
            returned = containers.floating_tensors_by_keys(output)
            self._is_in_8_bits = not returned and containers.is_quantised(output)
            self._output_keys = list(returned)
            count = len(self._keys)
            recorded = {keys: x for keys, x in returned.items() if keys[:count] == self._keys} if count else returned
        for input_ in inputs:
            if input_.is_changed and not any(input_.given is tensor for tensor in recorded.values()):
                input_.replace(input_.given)
        new_output = output
        for keys, tensor in recorded.items():
            new_tensor = self._capture(keys, tensor, inputs, list(returned.values()))
            if new_tensor is not tensor:
                new_output = containers.replace_tensor(new_output, tensor, new_tensor)
        return None if new_output is output else new_output

    def _capture(
        self, keys: tuple[str, ...], tensor: Tensor, inputs: list[containers.LayerInput], returned: list[Tensor]
    ) -> Tensor:
        """Record one output tensor, and return the tensor to pass on: if possible, the same object."""
        refuse_vmap(tensor)
        pytorch.set_grad_mode(True)
        source = next((input_ for input_ in inputs if input_.given is tensor), None)
        is_changed = source is not None and source.is_changed
        # Identity, and Dropout in evaluation mode, return their input itself. Later operations may change this tensor
        # in place. Other parts of the model may use it as the layer's input. So a copy is recorded as the layer's
        # output.
        is_shared = _shares_storage(tensor, [input_.given for input_ in inputs])
        must_keep_object = is_parameter_or_buffer(tensor, self._module) or (source is not None and not is_changed)
        # An earlier TargetLayer is recording. A new leaf would cut the graph after the earlier layer.
        if tensor.requires_grad:
            start = tensor.clone() if is_shared else tensor
        else:
            start = tensor.detach().clone(memory_format=_memory_format(tensor)).requires_grad_()
        identity = self._identity or (lambda tensor: tensor)
        # Do not store `identity(start)` in a variable: PyTorch swaps no tensor to which several references exist.
        if not (must_keep_object or tensor.requires_grad or pytorch.is_view(tensor)):
            passed_on = tensor.copy_(identity(start))
            self._passed_on.append(passed_on)
        else:
            passed_on = identity(start).clone(memory_format=_memory_format(start))
            memory = None if is_shared or tensor.requires_grad else pytorch.get_view_base(tensor)
            if not must_keep_object and containers.swap_contents(tensor, passed_on):
                start, passed_on = passed_on if start is tensor else start, tensor
                self._passed_on.append(passed_on)
                if memory is not None and not _shares_storage(memory, [*self._module.buffers(), *returned]):
                    self._mark_unrecorded(memory)
            elif not must_keep_object:
                self._mark_unrecorded(tensor)
        if source is not None and is_changed:
            # The layer changed its input in place. The gradient must include later uses of the changed input.
            passed_on = source.replace(passed_on)
        self._recorded[keys] = start
        self._versions.append(0 if start.is_inference() else start._version)
        return passed_on

    def _mark_unrecorded(self, tensor: Tensor) -> None:
        """Make the tensor require gradients, so that `require_single_path` finds it in the graph of a score."""
        if tensor.is_leaf and not (tensor.requires_grad or tensor.is_inference() or isinstance(tensor, nn.Parameter)):
            tensor.requires_grad_()
            if not pytorch.is_view(tensor):
                increment_version(tensor)  # If a view of this tensor is used later, PyTorch then raises an error.
            self._unrecorded.append(weakref.ref(tensor))

    def _weaken_passed_on(self) -> None:
        while self._passed_on:
            self._passed_on_refs.append(weakref.ref(self._passed_on.pop()))

    def _release_unrecorded(self) -> None:
        while self._unrecorded:
            if (tensor := self._unrecorded.pop()()) is not None:
                tensor.requires_grad = False

    def _store_gradient(self, grad_output: tuple[Tensor | None, ...]) -> None:
        self._gradients = grad_output[0]


def _memory_format(tensor: Tensor) -> torch.memory_format:
    # For a single image, the strides of a view fit several memory formats. For such a tensor, batch norm in evaluation
    # mode may return a gradient with mixed-up channels. So channels last is passed explicitly.
    if tensor.is_contiguous() or tensor.ndim not in (4, 5):
        return torch.preserve_format
    channels_last = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    return channels_last if tensor.is_contiguous(memory_format=channels_last) else torch.preserve_format


def _shares_storage(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    address = tensor.untyped_storage().data_ptr()
    dense = (candidate for candidate in others if candidate.layout == torch.strided)
    return any(candidate.untyped_storage().data_ptr() == address for candidate in dense)


def refuse_vmap(tensor: Tensor) -> None:
    """Raise `ModelError` for a tensor of a torch.func transform, which must not be stored outside the transform."""
    if pytorch.is_functorch_tensor(tensor):
        advice = "call the model, or gradcam.explain(), on the whole batch instead."
        raise ModelError(
            f"The model runs under torch.func (vmap, grad, jvp), where hooks cannot store tensors: {advice}"
        )
