"""Observe a transformer's attention while the model runs, and find the blocks that contain it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradcam.cam.forward import RecordedPass, caller_autocast
from gradcam.cam.measure_layout import run_changed
from gradcam.cam.verify_layout import find_order
from gradcam.errors import ModelError
from gradcam.hooks import pytorch
from gradcam.hooks.containers import Batch, at_least_float32, find_floating_tensor, version_of
from gradcam.hooks.hooks import Hooks, is_backward_running
from gradcam.layers.axes import AxisResolver
from gradcam.layers.find import LayerRef
from gradcam.layers.layout import Layout
from gradcam.layers.token_layout import find_layout, find_patches

SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.baddbmm)
# Functions that compute attention. `torch.autograd.grad` computes attention if it recomputes checkpoints.
FUNCTIONS_WITH_ATTENTION = (F.multi_head_attention_forward, torch.autograd.grad)
NO_ATTENTION = (
    "no attention was found. The model has no attention, or uses a custom kernel such as flash_attn (load Hugging Face "
    "models with attn_implementation='eager')"
)
OVERRIDE_CHECK = "has_torch_function"  # The function by which PyTorch's functions check for overrides.

KeepAttention = Callable[[Tensor], Tensor]
OnAttention = Callable[[tuple[int, ...]], KeepAttention | None]
OnResult = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# The innermost modules that ran the last attention over the image in an earlier pass. A later pass records the
# attention tensors in such a module. Afterwards, the caller checks that this attention was the last one again.
_last_attention_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class AttentionPatch(TorchFunctionMode):
    """A context that observes each attention in this thread: fused attention, and matrix products around a softmax.

    For each attention, `on_attention` is called with the shape (rows,...,queries,keys). If `on_attention` returns a
    function, this function takes the probabilities, and returns the probabilities to use. If `on_attention` returns
    None, the attention stays unchanged.

    Fused attention computes its output without probabilities. If a function needs the probabilities, they are computed
    in float32, or in the model's dtype if this dtype is more precise. The output then equals the fused kernel's output
    up to rounding, and has the same dtype.

    `on_result` is called with queries, keys and values, each (rows,...,tokens,channels), and the result. It returns the
    result to use. A softmax over the last of three or more axes counts as attention. The matrix product before the
    softmax provides queries and keys, and the product after the softmax provides values.
    """

    def __init__(self, on_attention: OnAttention, on_result: OnResult | None = None) -> None:
        super().__init__()
        self._on_attention, self._on_result = on_attention, on_result
        # The two factors of the last matrix product. If a softmax follows, they may be queries and transposed keys.
        self._factors: tuple[Tensor, Tensor] | None = None
        # The shape of the last softmax's result. The next matrix product resets the shape to None.
        self._shape: torch.Size | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS_WITH_ATTENTION and OVERRIDE_CHECK in func.__code__.co_names:
            with self:  # PyTorch deactivates the mode inside `__torch_function__`.
                return _copy_without_override_check(func)(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in SOFTMAXES and result.ndim > 2 and _get_axis(*args, **kwargs) in (-1, result.ndim - 1):
            transform = self._on_attention(tuple(result.shape))
            self._shape = result.shape
            # Clone, because the model may change the tensor in place.
            return result if transform is None else transform(result).clone()
        if self._on_result is not None and func in PRODUCTS and len(args) > 1 and result.ndim > 2:
            return self._follow_product(args[-2], args[-1], result)
        return result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        transform = self._on_attention((*query.shape[:-1], key.shape[-2]))
        if transform is None:
            result = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        else:
            result = _compute_unfused_attention(query, key, value, *args, **kwargs, transform=transform)
        return result if self._on_result is None else self._on_result(query, key, value, result)

    def _follow_product(self, first: Tensor, second: Tensor, result: Tensor) -> Tensor:
        """Detect an unfused attention: a product of queries and keys, a softmax, and a product with values."""
        factors, shape, self._shape = self._factors, self._shape, None
        self._factors = first, second
        if self._on_result is None or factors is None or shape is None or first.shape != shape:
            return result
        query, key = factors[0], factors[1].transpose(-2, -1)
        is_attention = query.shape[-2] == shape[-2] and key.shape[-2] == shape[-1]
        return self._on_result(query, key, second, result) if is_attention else result


def _get_axis(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> int | None:
    return dim


@functools.cache
def _copy_without_override_check(function: Any) -> Callable[..., Any]:
    """Return a copy of a PyTorch function without its check for overrides."""
    # While the mode is active, the check passes the call to the mode, and the mode calls the function again: an endless
    # recursion. While the mode is inactive, it cannot observe the function's softmax. A changed check in
    # torch.nn.functional would affect other threads. The function is therefore copied, together with its globals.
    new_globals = {**function.__globals__, OVERRIDE_CHECK: lambda _: False}
    return FunctionType(function.__code__, new_globals, function.__name__, function.__defaults__, function.__closure__)


def _compute_unfused_attention(  # noqa: PLR0917  # The signature of scaled_dot_product_attention.
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    transform: Callable[[Tensor], Tensor],
) -> Tensor:
    device = query.device.type
    autocast = None if query.dtype == torch.float64 else caller_autocast(device)
    dtype = autocast or query.dtype
    with pytorch.without_autocast(device):
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if enable_gqa:  # Grouped-query attention: several query heads share keys and values.
            group_size = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(group_size, -3), value.repeat_interleave(group_size, -3)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        logits = at_least_float32(query) * factor @ at_least_float32(key).transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            logits = logits + attn_mask
        probabilities = F.dropout(transform(logits.softmax(-1)), dropout_p)
        return probabilities.to(dtype) @ value


@dataclass(frozen=True)
class ObservedAttention:
    """The shape (rows,...,queries,keys) of one attention, and the names of the modules around it, outermost first."""

    shape: tuple[int, ...]
    running: tuple[str, ...]

    @property
    def keys(self) -> int:
        return self.shape[-1]

    @property
    def where(self) -> str:
        """Return the name of the innermost module; "" if no module was running."""
        return self.running[-1] if self.running else ""


@dataclass
class ModuleRun:
    """One run of a module: its inputs, and its output tensor once the run has finished.

    `num_before` is the number of attentions observed before this run.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_before: int
    output: Tensor | None = None


@dataclass(frozen=True)
class AttentionTensors:
    """The tensors of one attention: queries (N,heads,Q,d), keys and values (N,heads,T,d), and the output.

    The autograd graph starts at the output. `number` is the index of the attention in the pass. `enclosing_runs` are
    the runs of the modules around the attention, outermost first.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    number: int
    enclosing_runs: list[ModuleRun]


@dataclass(frozen=True)
class AttentionLog:
    """All attentions of one pass in order, and the output shapes of the modules that contain an attention.

    `tensors` maps the names of the modules that contain the last attention to their outputs, each with the tensor's
    version. `attention_tensors` holds the tensors of the last attention. It is empty until an earlier pass has found
    the module that runs the last attention.
    """

    attentions: list[ObservedAttention] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    attention_tensors: list[AttentionTensors] = field(default_factory=list)

    @contextlib.contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Record one run of the model, without changing it.

        If an earlier pass has shown which attention is the last, grad mode is on after this attention.
        """
        names = {module: name for name, module in model.named_modules()}
        self.modules.update({name: module for module, name in names.items()})
        running: list[ModuleRun] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running.append(ModuleRun(module, names[module], args, kwargs, len(self.attentions)))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            finished = running.pop()
            # Drop runs that ended with an exception. The model caught the exception.
            while finished.module is not module:
                finished = running.pop()
            finished.output = find_floating_tensor(output)
            if finished.output is not None and len(self.attentions) > finished.num_before:
                self.outputs[finished.name] = tuple(finished.output.shape)
                self.tensors[finished.name] = finished.output.detach(), version_of(finished.output)

        def observe(shape: tuple[int, ...]) -> None:
            self.attentions.append(ObservedAttention(shape, tuple(run.name for run in running)))
            self.tensors.clear()

        def on_result(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> Tensor:
            if not running or running[-1].module not in _last_attention_modules:
                return output
            start = output if output.requires_grad else output.detach().requires_grad_()
            torch.set_grad_enabled(True)
            # In a backward pass, a checkpoint recomputes an attention that is already recorded.
            if not is_backward_running():
                inputs = query.detach(), key.detach(), value.detach()
                self.attention_tensors[:] = [AttentionTensors(*inputs, start, len(self.attentions) - 1, running.copy())]
            return start.clone()  # Clone, because the model may change the tensor in place.

        with Hooks() as hooks, AttentionPatch(observe, on_result):
            for module in names:
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.before_forward(module, enter)
                    hooks.after_forward(module, leave)
            yield


@dataclass(frozen=True)
class AttentionBlocks:
    """The attention blocks of a model by name, in the order in which they run.

    `shape` is the shape of the last block's output, and `layout` places its tokens on the image.
    """

    modules: dict[str, nn.Module]
    layout: Layout
    shape: tuple[int, ...]

    @property
    def last(self) -> tuple[str, nn.Module]:
        return list(self.modules.items())[-1]

    @property
    def token_axis(self) -> int:
        """Return the axis of the tokens in a block's output."""
        return 1 - self.layout.image_axis

    def to_grid(self, values: Tensor) -> Tensor:
        """Return values of tokens (...,T) on the grid of the image (...,h,w), without extra tokens."""
        return values[..., self.layout.list_cells()].unflatten(-1, self.layout.grid)


def find_blocks(log: AttentionLog, recorded: RecordedPass) -> AttentionBlocks:
    """Return the attention blocks of the recorded model. A block is the outermost module with a single attention.

    Attention after the last block, such as attention pooling, belongs to the head. Raises `ModelError` if there is no
    attention, if a block's attention does not connect all tokens of the image, or if the number of tokens changes
    between blocks.
    """
    attentions, modules = _list_image_attention(log, recorded), {}
    for index, attention in enumerate(attentions):
        owner = _find_owner(attentions, index, log, recorded)
        if owner is None:
            reason = f"a module that contains only this attention, and returns its {attention.keys} tokens"
            raise cannot_follow(recorded, f"the attention in '{attention.where}' has no block ({reason})")
        name, layout = owner
        modules[name] = log.modules[name]
    return AttentionBlocks(modules, _put_in_order(layout, attention.keys, log, recorded), log.outputs[name])


def _put_in_order(layout: Layout, tokens: int, log: AttentionLog, recorded: RecordedPass) -> Layout:
    """Return the layout with the token order that is measured at the output of the last module with attention."""
    for name, shape in reversed(log.outputs.items()):
        assumed = _find_layout(shape, recorded, log.modules[name]) if len(shape) == 3 else None
        if assumed is not None and shape[1 - assumed.image_axis] == tokens:
            outlet, (activations, version) = LayerRef(name, log.modules[name]), log.tensors.get(name, (None, 0))
            # The log keeps this tensor only if no other attention followed. If the log has no tensor, or the tensor was
            # changed in place, run the model again.
            if activations is None or version_of(activations) != version:
                activations = run_changed(recorded.model, recorded.batch, [outlet], recorded.autocast).get(name)
            if activations is not None:
                return replace(layout, order=find_order(outlet, assumed, activations, recorded))
    return layout


def is_over_image(shape: Sequence[int], recorded: RecordedPass) -> bool:
    """Return whether an attention (N,...,T,T), or (N*heads,T,T), connects tokens that form a grid on each image."""
    return shape[-2] == shape[-1] and _find_key_layout(shape, recorded) is not None


def _find_key_layout(shape: Sequence[int], recorded: RecordedPass) -> Layout | None:
    """Return the layout of the keys of an attention (N,...,Q,T), or (N*heads,Q,T); None if they form no grid."""
    rows, keys, images = shape[0], shape[-1], recorded.batch.images
    are_images = rows == images if len(shape) == 4 else rows % images == 0 and len(shape) == 3
    return _find_layout((images, keys, 1), recorded) if are_images else None


def _find_layout(shape: Sequence[int], recorded: RecordedPass, module: nn.Module | None = None) -> Layout | None:
    batch, patches = recorded.batch, find_patches(recorded.modules)
    if module is None:
        return find_layout(shape, batch.size, None, batch.images, patches=patches)
    return AxisResolver(recorded.model, batch, patches).find_layout(shape, module)


def _list_image_attention(log: AttentionLog, recorded: RecordedPass) -> list[ObservedAttention]:
    if not log.attentions:
        raise cannot_follow(recorded, NO_ATTENTION)
    fits = [is_over_image(attention.shape, recorded) for attention in log.attentions]
    attentions = log.attentions[: len(fits) - fits[::-1].index(True) if any(fits) else None]
    for attention, fit in zip(attentions, fits):
        if not fit:
            raise cannot_follow(recorded, _describe_misfit(attention, recorded.batch))
    counts = list(dict.fromkeys(attention.keys for attention in attentions))
    if len(counts) > 1:
        raise cannot_follow(
            recorded, f"the number of tokens changes between blocks, from {' to '.join(map(str, counts))}"
        )
    return attentions


def find_last(log: AttentionLog, recorded: RecordedPass) -> tuple[int, Layout]:
    """Return the index of the last attention whose keys are tokens of the image, and the layout of these tokens.

    The queries may be other tokens, such as a class token or the probe of attention pooling. Raises `ModelError` if
    there is no such attention.
    """
    for number, attention in reversed(list(enumerate(log.attentions))):
        if (layout := _find_key_layout(attention.shape, recorded)) is not None:
            return number, _put_in_order(layout, attention.keys, log, recorded)
    reason = _describe_misfit(log.attentions[-1], recorded.batch) if log.attentions else NO_ATTENTION
    raise cannot_follow(recorded, reason)


def find_attention_tensors(log: AttentionLog, number: int) -> AttentionTensors | None:
    """Return the recorded tensors of attention `number`; None if this attention was not recorded."""
    return next((tensors for tensors in log.attention_tensors if tensors.number == number), None)


def remember_last(log: AttentionLog, number: int, recorded: RecordedPass) -> None:
    """Remember for later passes that the module of this attention runs the last attention over the image."""
    running = log.attentions[number].running
    _last_attention_modules.add(log.modules[running[-1]] if running else recorded.model)


def find_enclosing_block(
    attended: AttentionTensors, log: AttentionLog, recorded: RecordedPass
) -> tuple[ModuleRun, Layout] | None:
    """Return the outermost module that contains only this attention and returns its tokens; None if there is none."""
    name, layout = _find_owner(log.attentions, attended.number, log, recorded) or (None, None)
    block_run = next((run for run in attended.enclosing_runs if run.name == name), None)
    return None if layout is None or block_run is None else (block_run, layout)


def _describe_misfit(attention: ObservedAttention, batch: Batch) -> str:
    shape = f"the attention in '{attention.where}' is {attention.shape}"
    if attention.shape[-2] != attention.keys:
        return f"{shape}: its queries and keys are different tokens (cross-attention, or pooled keys)"
    if attention.shape[0] != batch.images or len(attention.shape) > 4:
        return f"{shape} for {batch.images} image(s): it covers only windows or other parts of each image"
    size = " x ".join(map(str, batch.size))
    return f"{shape}, and {attention.keys} tokens form no grid on images of {size} (it may be channel attention)"


def _find_owner(
    attentions: Sequence[ObservedAttention], index: int, log: AttentionLog, recorded: RecordedPass
) -> tuple[str, Layout] | None:
    """Return the outermost module that contains only this attention and returns its tokens, and their layout."""
    tokens = attentions[index].keys
    other_modules = {name for i, attention in enumerate(attentions) if i != index for name in attention.running}
    for name in attentions[index].running:
        shape = log.outputs.get(name, ())
        if name not in other_modules and len(shape) == 3:
            layout = _find_layout(shape, recorded, log.modules[name])
            if layout is not None and shape[1 - layout.image_axis] == tokens:
                return name, layout
    return None


def cannot_follow(recorded: RecordedPass, reason: str) -> ModelError:
    """Return the error for a model whose attention cannot be traced back to the image."""
    problem = f"The attention of {type(recorded.model).__name__} cannot be traced back to the image"
    return ModelError(f"{problem}: {reason}. Choose a method that explains a layer, such as 'gradcam'.")


def keep_values(probabilities: Tensor) -> Tensor:
    """Return the probabilities unchanged, without recording a graph."""
    return probabilities


def keep_differentiable(probabilities: Tensor) -> Tensor:
    """Turn grad mode on, and return the probabilities as a tensor that requires gradients.

    The probabilities of the first block become a leaf of the graph, and the probabilities of later blocks depend on
    this leaf.
    """
    if not probabilities.requires_grad:
        probabilities = probabilities.detach().requires_grad_()
    torch.set_grad_enabled(True)
    return probabilities


@contextlib.contextmanager
def capture_attention(blocks: AttentionBlocks, recorded: RecordedPass, keep: KeepAttention) -> Iterator[list[Tensor]]:
    """Yield a list that collects the attention (N,heads,T,T) of each block while the model runs.

    `keep` takes the attention of a block, and returns the tensor to collect and to use in the model. Run the backward
    pass in this context too. Checkpoints run blocks again in the backward pass, and have to compute attention as in the
    first run. The context makes the backward pass run in this thread, because attention in other threads is not
    observed. The attention of a block has N x heads x T x T values: 1.8 MB for one image in ViT-B/16. The autograd
    graph takes as much memory as in a training step.
    """
    images, tokens, attentions = recorded.batch.images, blocks.shape[blocks.token_axis], list[Tensor]()

    def on_attention(shape: tuple[int, ...]) -> KeepAttention | None:
        return capture if shape[-1] == tokens and is_over_image(shape, recorded) else None

    def capture(probabilities: Tensor) -> Tensor:
        by_head = probabilities if probabilities.ndim == 4 else probabilities.unflatten(0, (images, -1))
        captured = keep(by_head)
        if not is_backward_running():
            attentions.append(captured)
        return captured.view_as(probabilities)

    with AttentionPatch(on_attention), torch.autograd.set_multithreading_enabled(False):
        yield attentions


def require_all(attentions: list[Tensor], blocks: AttentionBlocks) -> None:
    """Raise `ModelError` unless there is one attention per block."""
    if len(attentions) != len(blocks.modules):
        raise ModelError(
            f"Two passes of the model differ: in the second pass, its {len(blocks.modules)} blocks computed "
            f"{len(attentions)} attentions instead of one each. Choose a method that explains a layer, such as 'gradcam'."
        )
