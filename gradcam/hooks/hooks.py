"""The hooks that this package puts on a model: their owner, the pair for a target layer, and whose pass they see."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import swap_tensors
from torch.utils.hooks import RemovableHandle, unserializable_hook

from gradcam.errors import LayerError, ModelError, join_names, shorten, warn
from gradcam.hooks import autograd as gradients
from gradcam.hooks import pytorch
from gradcam.hooks.nested import (
    IN_FLOATS,
    LayerInput,
    floating_by_keys,
    is_in_8_bits,
    replace_tensor,
    take_inputs,
)
from gradcam.options import keep_old_names

ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
PreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
BackwardHook = Callable[[tuple[Tensor | None, ...]], None]
TAP = "gradcam tap"  # what a tap is called on the node that made the tensor, with the output's number
FEWEST_TO_SIFT = 64  # handles; of those, the ones whose tensors are gone are dropped whenever as many again have come
_openings = itertools.count()


class Hooks:
    """Hooks on modules, all removed when the context ends, however it ends. Forward hooks act only in the thread that
    entered the context: several threads may run one model, each with its own. Backward hooks do not filter, since on
    CUDA autograd calls them from threads of its own."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._thread: int | None = None
        self._opening = 0  # which of all owners this is, in the order in which they were entered
        self._most_handles = FEWEST_TO_SIFT

    def __enter__(self) -> Hooks:
        self._thread = threading.get_ident()
        self._opening = next(_openings)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        self._thread = None
        while self._handles:
            self._handles.pop().remove()

    def before_forward(self, module: nn.Module, function: PreHook) -> None:
        """Call `function(module, args, kwargs)` before the module runs; what it returns replaces its arguments."""

        def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            refuse_compiling()
            return function(module, args, *rest) if threading.get_ident() == self._thread else None  # as below

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after_forward(self, module: nn.Module, function: ForwardHook, *, repeated: ForwardHook | None = None) -> None:
        """Call `function(module, args, kwargs, output)` after the module ran; what it returns replaces the output.
        `repeated` is called in its place where a backward pass repeats the run for a checkpoint, in whichever thread
        autograd does that: on CUDA in one of its own."""

        def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            refuse_compiling()
            repeats = repeated is not None and is_backward_running()
            if len(rest) < 2 or not (repeats or threading.get_ident() == self._thread):
                # Also while the hook is half registered or half removed: another thread may then get (module, args,
                # output) without the keyword arguments, because PyTorch keeps that flag in a second dictionary.
                return None
            kwargs, output = rest
            return (repeated if repeated is not None and repeats else function)(module, args, kwargs, output)

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def after_backward(self, module: nn.Module, function: BackwardHook) -> None:
        """Call `function(grad_output)` when the gradient at the module's outputs is there (a full backward hook)."""
        self._handles.append(module.register_full_backward_hook(lambda module, grad_input, output: function(output)))

    def at_gradient(self, tensor: Tensor, function: gradients.GradientHook) -> None:
        """Call `function(gradient)` when the gradient of a tensor that requires one is there, before it flows on."""
        # Saving the tensor is no reason to warn. The mark goes on an object of our own.
        self._keep(tensor.register_hook(unserializable_hook(partial(function))))

    def pass_gradient(self, tensor: Tensor, function: gradients.GradientHook) -> Tensor:
        """Let `function` see or replace the gradient of a tensor that requires one; gives the tensor to go on with. The
        pair's other half. It is the gradient as `retain_grad()` shows it, of all uses together and behind every edit
        (`edit_gradient`), with respect to the tensor as it is now, whatever is done in place to it later. The graph is
        as without; only views and leaves go on as a clone, of whose uses it is the gradient."""
        tap, tensor = find_tap(tensor)
        self._add(tap.looks, function)
        return tensor

    def edit_gradient(self, tensor: Tensor, function: gradients.GradientHook) -> Tensor:
        """The same before any look at it, with a `function` that changes it; edits run in the order of their owners."""
        tap, tensor = find_tap(tensor)
        self._add(tap.edits, (self._opening, function))
        return tensor

    def _add(self, functions: OrderedDict[int, Any], function: Any) -> None:
        handle = RemovableHandle(functions)
        functions[handle.id] = function
        self._keep(handle)

    def _keep(self, handle: RemovableHandle) -> None:
        """Own a handle of something short-lived: of a whole epoch's tensors only those that are still there are kept."""
        self._handles.append(handle)
        if len(self._handles) > self._most_handles:
            self._handles = [it for it in self._handles if it.hooks_dict_ref() is not None]
            self._most_handles = max(FEWEST_TO_SIFT, 2 * len(self._handles))


def is_backward_running() -> bool:
    """In this thread: PyTorch itself tells checkpoints and hooks so."""
    return pytorch.find_backward_task() != -1


def refuse_compiling() -> None:
    """Raises `ModelError` while torch.compile traces, which then leaves these calls uncompiled where it may."""
    if torch.compiler.is_compiling():
        raise ModelError("Hooks cannot be part of a compiled function: use the uncompiled model to inspect it.")


def find_tap(tensor: Tensor) -> tuple[gradients.GradientTap, Tensor]:
    """The tap of a tensor that requires gradients, and the tensor. Views go on as a clone: what is done to them in
    place leaves their node out. So do leaves, which have none. A view that nobody has looked at yet becomes its clone,
    for whoever has it by another name."""
    if tensor.grad_fn is None or pytorch.is_view(tensor):
        clone = tensor.clone()
        if tensor.grad_fn is None or not swap_contents(tensor, clone):
            tensor = clone
    node: Any = tensor.grad_fn
    key = f"{TAP} {tensor.output_nr}"
    tap = node.metadata.get(key)
    if not isinstance(tap, gradients.GradientTap):
        tap = node.metadata[key] = gradients.GradientTap(tensor, node)
    return tap, tensor


def is_owned(tensor: Tensor, module: nn.Module) -> bool:
    """Whether it is a parameter or a buffer of the module, which has to stay what it is."""
    if isinstance(tensor, nn.Parameter):
        return True
    return any(tensor is buffer for buffer in module.buffers())


def swap_contents(tensor: Tensor, other: Tensor) -> bool:
    """Swap what two tensor objects hold, for everyone who has them; return False where PyTorch forbids it.

    It does where autograd saved one of them, and where a view of it or a weak reference to it exists.
    """
    attributes = dict(vars(tensor))
    try:
        swap_tensors(tensor, other)
    except RuntimeError:
        return False
    vars(tensor).update(attributes)
    return True


class Holder:
    """One explanation. It is held weakly: one that was interrupted before it could let go is forgotten with its frame."""


class Here(threading.local):
    """What this thread holds as it is, and the grad modes that its open contexts found, the outermost first."""

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.grad_modes: list[list[bool]] = []


here = Here()


def is_undisturbed() -> bool:
    """Whether what runs in this thread is an explanation, or another look at a model, rather than the user's own pass."""
    return bool(here.holders)


def is_inner_look() -> Callable[[], bool]:
    """Whether, whenever it is asked in this thread, what runs there is a look at a model that began later than this call."""
    outer = weakref.WeakSet(here.holders)
    return lambda: any(holder not in outer for holder in here.holders)


@contextlib.contextmanager
def recording_off() -> Iterator[None]:
    """No recording until somebody switches it on; at the end the grad mode is what it was, in whatever order contexts
    end. `torch.no_grad` would not do: where the outer of two contexts ends first, as an abandoned generator's may, the
    inner one would restore what the outer had set, for good."""
    found = here.grad_modes
    mode = [torch.is_grad_enabled()]
    found.append(mode)
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        inner = next((later for earlier, later in itertools.pairwise(found) if earlier is mode), None)
        if inner is None:
            torch.set_grad_enabled(mode[0])
        else:  # it ends later, and then restores what this one found
            inner[0] = mode[0]
        found[:] = [other for other in found if other is not mode]


@keep_old_names
class TargetLayer:
    """Record one layer's activations, and compute the gradient of a score with respect to them.

    Nothing before the layer is recorded for autograd: the backward pass covers only the layers after it, changes no
    ``.grad``, and needs no parameter that requires gradients. The layer's output is passed on as a clone, so that later
    in-place operations cannot change the recorded tensor. Several `TargetLayer` contexts may be open at once. Recording
    stays on from the layer's first run to the end of the context: use one context per forward pass.

    Parameters
    ----------
    module : nn.Module
        The layer.
    name : str, default the module's type
        Its name in messages.
    keys : sequence of str, default ()
        The keys and indices of one tensor, if the layer returns several.
    run : int, default None
        The run to record, counted from 0, if the layer runs several times.
    has_backward_hook : bool, default True
        If True, a plain `score.backward()` also sets `gradients`. If False, only the method `backward` does.

    Raises
    ------
    LayerError
        If the layer is not a module.
    ModelError
        If recording is impossible: in `torch.inference_mode()`, on a TorchScript module, under `torch.func`.

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

    # How it works. A full backward hook on the layer itself would make the layer's output a view, which the in-place
    # operation that often follows must not modify (pytorch issue 61519). So the forward hook keeps the output as a leaf
    # that requires gradients, switches recording on for what follows, and sends the leaf through a private identity
    # module, which carries the full backward hook; a clone of that is what the rest of the model sees.

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
            raise ModelError(
                "The layer is a TorchScript module, whose output a hook cannot replace: use the original Python model."
            )
        self.name = name or type(module).__name__
        self._module, self._keys, self._run = module, tuple(keys), run
        self._passage = nn.Identity() if has_backward_hook else None
        self._context: contextlib.ExitStack | None = None
        self.ran_unrecorded = False  # so does the first layer to run; the next does if the model switched recording off
        self._runs = 0
        self._inputs: list[LayerInput] = []
        self._is_in_8_bits = False
        self._given: list[tuple[str, ...]] = []  # the keys of all that the layer gave
        self._recorded: dict[tuple[str, ...], Tensor] = {}
        self._versions: list[int] = []
        self._unrecorded: list[
            weakref.ref[Tensor]
        ] = []  # tensors that share the output's values; reading them is an error
        self._passed_on: list[Tensor] = []  # PyTorch swaps no tensor that a weak reference leads to, so not weakly
        self._left: list[weakref.ref[Tensor]] = []  # of those, once the context has ended
        self._gradients: Tensor | None = None

    def __enter__(self) -> TargetLayer:
        if self._context is not None:
            raise LayerError(f"Layer '{self.name}' is already recorded: create another TargetLayer to nest contexts.")
        if torch.is_inference_mode_enabled():
            raise ModelError(
                "TargetLayer cannot record inside torch.inference_mode(): use torch.no_grad() instead, "
                "or gradcam.explain(), which leaves that mode itself."
            )
        is_training = torch.is_grad_enabled() and self._module.training
        if is_training and any(it.requires_grad for it in self._module.parameters()):
            warn(
                f"Layer '{self.name}' is in training mode, but gradients before it are not recorded: a loss computed here "
                "trains only later layers. Call model.eval() to explain, or use gradcam.inspection.record() in training."
            )
        with contextlib.ExitStack() as context:
            context.enter_context(recording_off())  # until the layer has run
            context.callback(self._release_unrecorded)
            context.callback(self._leave_passed_on)
            hooks = context.enter_context(Hooks())
            self._is_others_run = is_inner_look()
            hooks.before_forward(self._module, self._keep_inputs)
            hooks.after_forward(self._module, self._keep_activations)
            if self._passage is not None:
                hooks.after_backward(self._passage, self._keep_gradients)
            self._context = context.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()

    @property
    def activations(self) -> Tensor:
        """The layer's output (its first floating-point tensor), unchanged by later operations.

        Raises `LayerError` if the layer did not run, ran more than once, or returned no floating-point tensor.
        """
        return next(iter(self.recorded.values()))

    @property
    def recorded(self) -> dict[tuple[str, ...], Tensor]:
        """Every floating-point tensor that the layer returned, by its keys and indices. Raises as `activations` does."""
        if self._runs == 0:
            raise LayerError(
                f"Layer '{self.name}' did not run in the forward pass: choose one on the path from the input to the score. "
                "(Hooks are skipped in compiled modules, and in modules whose forward() is called directly.)"
            )
        if self._run is None and self._runs > 1:
            raise LayerError(
                f"Layer '{self.name}' ran {self._runs} times before the backward pass: name one of its runs, "
                f"'{self.name}#0' to '#{self._runs - 1}', or a layer that runs once, such as the block around it."
            )
        if self._run is not None and self._runs <= self._run:
            raise LayerError(f"Layer '{self.name}' ran {self._runs} time(s): runs are counted from 0.")
        if not self._recorded:
            if self._keys:
                given = [":".join(keys) for keys in self._given if keys]
                there = f"it has {join_names(given)}" if given else "its output is one tensor"
                raise LayerError(
                    f"Layer '{self.name}' has no floating-point tensor under '{':'.join(self._keys)}': {there}."
                )
            if self._is_in_8_bits:
                raise LayerError(f"Layer '{self.name}' gives {IN_FLOATS}")
            raise gradients.no_floating_tensor([self.name])
        for tensor, version in zip(self._recorded.values(), self._versions):
            if not tensor.is_inference() and tensor._version != version:
                raise LayerError(
                    f"The output of layer '{self.name}' is changed in place later, through another tensor: choose a layer "
                    "after that change, or explain this layer alone."
                )
        return self._recorded

    @property
    def gradients(self) -> Tensor:
        """The gradient of the last score, shaped like `activations`. Raises `LayerError` before `backward`."""
        if self._gradients is None:
            raise LayerError(
                f"Layer '{self.name}' has no gradients yet: call layer.backward(score) after the forward pass."
            )
        return self._gradients

    def backward(self, score: Tensor) -> Tensor:
        """Compute the gradient of a score at the layer. Call it again for other scores of the same forward pass.

        Parameters
        ----------
        score : Tensor
            A floating-point tensor with one value.

        Returns
        -------
        Tensor
            Shaped like `activations`. It is float32 if the activations or the score are float16, which would lose small
            values.

        Raises
        ------
        LayerError
            If the score does not depend on the layer.
        ModelError
            If gradient recording was off, or a plain `backward()` has already freed the graph.
        """
        if not isinstance(score, Tensor) or score.numel() != 1 or not score.is_floating_point():
            what = f"{score.dtype} {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
            raise LayerError(
                f"The score is {what}, expected a floating-point tensor with one value: sum it, or pick an element."
            )
        activations = self.activations
        if not score.requires_grad:
            raise gradients.no_gradient([self.name])
        scaled = torch.float16 in (activations.dtype, score.dtype)
        with torch.enable_grad():
            scores = score.reshape(1, 1)
        self.require_single_path(score)
        try:
            ((gradient,),) = gradients.jacobian(scores, [activations], scaled=scaled)
        except RuntimeError as error:
            if not pytorch.says(error, pytorch.GRAPH_IS_FREED):
                raise
            raise ModelError(
                "The graph of this forward pass is already freed: pass retain_graph=True to all but the last backward()."
            ) from error
        if gradient is None:
            raise gradients.no_dependence([self.name])
        self._gradients = gradient[0]
        return self._gradients

    @property
    def has_several_outputs(self) -> bool:
        """True if the layer returned several tensors to choose from."""
        return len(self._recorded) > 1

    def release(self) -> None:
        """Detach the recorded tensors from the graph, when no backward pass will follow."""
        self._leave_passed_on()
        while self._left:
            tensor = self._left.pop()()
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
        if unrecorded and any(leaf is tensor for leaf in gradients.leaves(score) for tensor in unrecorded):
            raise LayerError(
                f"The output of layer '{self.name}' is also read through another view of its memory, whose gradient is not "
                "recorded: choose an earlier or a later layer."
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
        given: dict[tuple[str, ...], Tensor] = {}
        found: dict[tuple[str, ...], Tensor] = {}
        if self._runs == (self._run or 0) + 1:
            self._recorded, self._versions = {}, []
            self._release_unrecorded()
            self._passed_on.clear()
            self._left.clear()
            self.ran_unrecorded = not torch.is_grad_enabled()
            given = floating_by_keys(output)
            self._is_in_8_bits = not given and is_in_8_bits(output)
            self._given = list(given)
            found = given
            if self._keys:
                found = {keys: tensor for keys, tensor in given.items() if keys[: len(self._keys)] == self._keys}
        for each in inputs:
            if each.is_changed and not any(each.given is tensor for tensor in found.values()):
                each.replace(each.given)
        handed_on = output
        for keys, tensor in found.items():
            goes_on = self._record(keys, tensor, inputs, list(given.values()))
            if goes_on is not tensor:
                handed_on = goes_on if handed_on is tensor else replace_tensor(handed_on, tensor, goes_on)
        return None if handed_on is output else handed_on

    def _record(self, keys: tuple[str, ...], tensor: Tensor, inputs: list[LayerInput], given: list[Tensor]) -> Tensor:
        """Keep what the layer gave; gives what goes on, which is the same object wherever that can be."""
        refuse_vmap(tensor)
        torch.set_grad_enabled(True)
        source = next((each for each in inputs if each.given is tensor), None)
        is_changed = source is not None and source.is_changed
        # Dropout in evaluation mode and Identity return their input, which may be changed in place later, and which the
        # model goes on using as what came to the layer, not as what left it.
        is_shared = _shares_storage(tensor, [each.given for each in inputs])
        is_kept = is_owned(tensor, self._module) or (source is not None and not is_changed)
        if tensor.requires_grad:  # a TargetLayer further up is open: a new leaf would cut its gradient off
            start = tensor.clone() if is_shared else tensor
        else:
            start = tensor.detach().clone(memory_format=_format_of(tensor)).requires_grad_()
        # A name for the identity module's output would keep PyTorch from swapping it.
        if not (is_kept or tensor.requires_grad or pytorch.is_view(tensor)):
            handed_on = tensor.copy_(start if self._passage is None else self._passage(start))
            self._passed_on.append(handed_on)
        else:
            handed_on = (start if self._passage is None else self._passage(start)).clone(
                memory_format=_format_of(start)
            )
            memory = None if is_shared or tensor.requires_grad else pytorch.base_of(tensor)
            if is_kept:
                pass
            elif swap_contents(tensor, handed_on):
                start, handed_on = handed_on if start is tensor else start, tensor
                self._passed_on.append(handed_on)
                if memory is not None and not _shares_storage(memory, itertools.chain(self._module.buffers(), given)):
                    self._forbid_reading(memory)
            else:
                self._forbid_reading(tensor)
        if source is not None and is_changed:
            handed_on = source.replace(handed_on)  # has to lead to the gradient under its old name as well
        self._recorded[keys] = start
        self._versions.append(0 if start.is_inference() else start._version)
        return handed_on

    def _forbid_reading(self, tensor: Tensor) -> None:
        """Let the graph of a score that reads this tensor end there, which `require_single_path` finds."""
        if tensor.is_leaf and not (tensor.requires_grad or tensor.is_inference() or isinstance(tensor, nn.Parameter)):
            tensor.requires_grad_()
            if not pytorch.is_view(tensor):
                increment_version(tensor)  # PyTorch then raises an error for views of it
            self._unrecorded.append(weakref.ref(tensor))

    def _leave_passed_on(self) -> None:
        while self._passed_on:
            self._left.append(weakref.ref(self._passed_on.pop()))

    def _release_unrecorded(self) -> None:
        while self._unrecorded:
            if (tensor := self._unrecorded.pop()()) is not None:
                tensor.requires_grad = False

    def _keep_gradients(self, grad_output: tuple[Tensor | None, ...]) -> None:
        self._gradients = grad_output[0]


def _format_of(tensor: Tensor) -> torch.memory_format:
    # Channels last by name where it is so: of one image a view's strides may be read as those of another order, and
    # PyTorch's batch norm in evaluation mode then gives a gradient whose channels are mixed up.
    by_name = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    is_plain = by_name is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=by_name)
    return torch.preserve_format if by_name is None or is_plain else by_name


def _shares_storage(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    address = tensor.untyped_storage().data_ptr()
    dense = (other for other in others if other.layout == torch.strided)
    return any(other.untyped_storage().data_ptr() == address for other in dense)


def refuse_vmap(tensor: Tensor) -> None:
    """Raises `ModelError` for what only torch.func sees, and takes back."""
    if pytorch.is_functorch_tensor(tensor):
        raise ModelError(
            "The model runs under torch.func (vmap, grad, jvp), where hooks cannot store tensors: "
            "call the model, or gradcam.explain(), on the whole batch instead."
        )
