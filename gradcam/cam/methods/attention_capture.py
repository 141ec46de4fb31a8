"""A transformer's attention: met while the model runs, and its blocks, if it can be followed from one to the next."""

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

from gradcam.cam.forward import Recorded, caller_autocast
from gradcam.cam.grid import at_least_float32, find_order
from gradcam.cam.places import run_changed
from gradcam.errors import ModelError
from gradcam.hooks import pytorch
from gradcam.hooks.hooks import Hooks, is_backward_running
from gradcam.hooks.nested import Batch, first_floating, version_of
from gradcam.layers.find import Outlet
from gradcam.layers.layout import Axes, Layout, find_layout, find_patches

SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.baddbmm)
HOLDING = (F.multi_head_attention_forward, torch.autograd.grad)  # attentions, which the latter repeats for checkpoints
UNSEEN = (
    "no attention was found. The model has none, or uses a custom kernel such as flash_attn (load Hugging Face models with "
    "attn_implementation='eager')"
)
QUESTION = "has_torch_function"  # what a function of PyTorch's asks before it does anything

Keep = Callable[[Tensor], Tensor]
Meet = Callable[[tuple[int, ...]], Keep | None]
Pass = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# The modules in which the last attention over the picture was seen, which each pass confirms: it is recorded at once.
_last: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class AttentionPatch(TorchFunctionMode):
    """A context that meets each attention of a model in this thread: the fused kind, and those made with a softmax.

    `meet`: called with the shape (rows,...,queries,keys) of an attention before it is computed. The function that it gives
    is called with the probabilities, and what that returns takes their place; None leaves the attention as it is. Those
    of fused attention are computed in float32, or in more where the model does, and only if they are wanted; the output is
    that of the fused kernel up to rounding, in its precision. `hand_on`: called with queries, keys and values, each
    (rows,...,tokens,channels), and with what they gave; what it returns goes on in place of that.
    A softmax over the last of at least three dimensions is taken for an attention, between the products before and
    behind it.
    """

    def __init__(self, meet: Meet, hand_on: Pass | None = None) -> None:
        super().__init__()
        self._meet, self._hand_on = meet, hand_on
        self._factors: tuple[Tensor, Tensor] | None = None  # of the last product: queries, and keys across, it may be
        self._shape: torch.Size | None = None  # of the probabilities, once there are any

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HOLDING and QUESTION in func.__code__.co_names:
            with self:  # which is not active inside of itself
                return _body(func)(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            take = self._meet(_shape_of_attention(*args, **kwargs))
            result = func(*args, **kwargs) if take is None else _attend_openly(*args, **kwargs, take=take)
            return result if self._hand_on is None else self._hand_on(*_three(*args, **kwargs), result)
        result = func(*args, **kwargs)
        if func in SOFTMAXES and result.ndim > 2 and _axis(*args, **kwargs) in (-1, result.ndim - 1):
            take = self._meet(tuple(result.shape))
            self._shape = result.shape
            return result if take is None else take(result).clone()  # which the model may change in place
        if self._hand_on is not None and func in PRODUCTS and len(args) > 1 and result.ndim > 2:
            return self._follow_product(args[-2], args[-1], result)
        return result

    def _follow_product(self, left: Tensor, right: Tensor, result: Tensor) -> Tensor:
        """Of an attention that is written out, with its queries and keys in one product, and its values in the next."""
        before, shape, self._shape = self._factors, self._shape, None
        self._factors = left, right
        if self._hand_on is None or before is None or shape is None or left.shape != shape:
            return result
        query, key = before[0], before[1].transpose(-2, -1)
        is_it = query.shape[-2] == shape[-2] and key.shape[-2] == shape[-1]
        return self._hand_on(query, key, right, result) if is_it else result


def _three(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query, key, value


def _shape_of_attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    return (*query.shape[:-1], key.shape[-2])


def _axis(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> int | None:
    return dim


@functools.cache
def _body(function: Any) -> Callable[..., Any]:
    """A function of PyTorch's without its question whether somebody overrides it."""
    # With a mode active, that is answered yes: the function hands itself over to the mode before it does any work, again
    # and again, and with the mode off, the softmax or the fused attention in it is not seen. Another answer in place of
    # torch.nn.functional's own would be given to other threads, too; so the function is made anew with an answer of ours.
    names = {**function.__globals__, QUESTION: lambda _: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def _attend_openly(  # noqa: PLR0917  # as they are there
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    take: Callable[[Tensor], Tensor],
) -> Tensor:
    device = query.device.type
    autocast = None if query.dtype == torch.float64 else caller_autocast(device)
    kind = autocast or query.dtype
    with pytorch.without_autocast(device):
        query, key, value = query.to(kind), key.to(kind), value.to(kind)
        if enable_gqa:  # several heads share their keys and values
            shared = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        logits = at_least_float32(query) * factor @ at_least_float32(key).transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            logits = logits + attn_mask
        probabilities = F.dropout(take(logits.softmax(-1)), dropout_p)
        return probabilities.to(kind) @ value


@dataclass(frozen=True)
class Sighting:
    """One attention: its shape (rows,...,queries,keys), and the modules that were running, the outermost first."""

    shape: tuple[int, ...]
    running: tuple[str, ...]

    @property
    def keys(self) -> int:
        return self.shape[-1]

    @property
    def where(self) -> str:
        """The innermost module, "" where there is none."""
        return self.running[-1] if self.running else ""


@dataclass
class Running:
    """One run of a module: what it was given, and the tensor that it gave, once it has. `sightings`: how many there were
    at its start."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sightings: int
    output: Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """An attention as it was computed: queries (N,heads,Q,d), keys and values (N,heads,T,d), as they were; what it gave,
    from which on autograd has recorded. `number`: of its sighting. `around`: what was running, the outermost first."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    number: int
    around: list[Running]


@dataclass(frozen=True)
class AttentionLog:
    """All attentions of one pass in their order, and the output's shape of each module around one that gave a tensor.
    `tensors`: what the modules around the last of them gave, and its version. `attended`: the last one, where it is known
    from an earlier pass to be that, and alone."""

    sightings: list[Sighting] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    attended: list[Attended] = field(default_factory=list)

    @contextlib.contextmanager
    def taken(self, model: nn.Module) -> Iterator[None]:
        """Around one run of the model, of which nothing is changed. Recording stays on behind an attention that is known
        to be the last."""
        names = {module: name for name, module in model.named_modules()}
        self.modules.update({name: module for module, name in names.items()})
        running: list[Running] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running.append(Running(module, names[module], args, kwargs, len(self.sightings)))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            own = running.pop()
            while own.module is not module:  # left by an exception that the model caught
                own = running.pop()
            own.output = first_floating(output)
            if own.output is not None and len(self.sightings) > own.sightings:
                self.outputs[own.name] = tuple(own.output.shape)
                self.tensors[own.name] = own.output.detach(), version_of(own.output)

        def see(shape: tuple[int, ...]) -> None:
            self.sightings.append(Sighting(shape, tuple(each.name for each in running)))
            self.tensors.clear()

        def hand_on(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> Tensor:
            if not running or running[-1].module not in _last:
                return output
            start = output if output.requires_grad else output.detach().requires_grad_()
            torch.set_grad_enabled(True)
            if not is_backward_running():  # which repeats for a checkpoint what there was before
                given = (query.detach(), key.detach(), value.detach())
                self.attended[:] = [Attended(*given, start, len(self.sightings) - 1, running.copy())]
            return start.clone()  # which the model may change in place

        with Hooks() as hooks, AttentionPatch(see, hand_on):
            for module in names:
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.before_forward(module, enter)
                    hooks.after_forward(module, leave)
            yield


@dataclass(frozen=True)
class Blocks:
    """By name, in the order in which they ran; `shape`: of the last one's output, in which `layout` is the picture."""

    modules: dict[str, nn.Module]
    layout: Layout
    shape: tuple[int, ...]

    @property
    def last(self) -> tuple[str, nn.Module]:
        return list(self.modules.items())[-1]

    @property
    def token_axis(self) -> int:
        """The axis of the tokens in a block's output."""
        return 1 - self.layout.image_axis

    @property
    def tokens(self) -> int:
        return self.shape[self.token_axis]

    def to_grid(self, values: Tensor) -> Tensor:
        """Values of tokens (...,T) at their places in the picture (...,h,w), without those of other tokens."""
        return values[..., self.layout.list_cells()].unflatten(-1, self.layout.grid)


def find_blocks(log: AttentionLog, recorded: Recorded) -> Blocks:
    """The blocks of the model that was recorded, each of which is the outermost module around one attention only. What
    comes behind the last of them, such as a pooling by attention, is the head's matter. Raises `ModelError` where a
    block's attention is not between all tokens of the picture, the same in all blocks, or where there is none."""
    attentions = _all_over_the_picture(log, recorded)
    owners = [_owner(attentions, index, log, recorded) for index in range(len(attentions))]
    shape = log.outputs[owners[-1]]
    modules = {name: log.modules[name] for name in owners}
    layout = _find_layout(shape, recorded, modules[owners[-1]])
    if layout is None:  # not so: `_owner` has found one
        raise cannot_follow(recorded, "its tokens form no grid")
    return Blocks(modules, _put_in_order(layout, attentions[-1].keys, log, recorded), shape)


def _put_in_order(layout: Layout, tokens: int, log: AttentionLog, recorded: Recorded) -> Layout:
    """Return the layout of so many tokens in the order in which those of the last module around attention respond."""
    for name, shape in reversed(log.outputs.items()):
        assumed = _find_layout(shape, recorded, log.modules[name]) if len(shape) == 3 else None
        if assumed is not None and shape[1 - assumed.image_axis] == tokens:
            outlet, (activations, version) = Outlet(name, log.modules[name]), log.tensors.get(name, (None, 0))
            if activations is None or version_of(activations) != version:  # other attention came, or it was changed
                activations = run_changed(recorded.model, recorded.batch, [outlet], recorded.autocast).get(name)
            if activations is not None:
                return replace(layout, order=find_order(outlet, assumed, activations, recorded))
    return layout


def is_over_picture(shape: Sequence[int], recorded: Recorded) -> bool:
    """Whether an attention (N,...,T,T), or (N*heads,T,T), is between tokens of each picture, and they form a grid."""
    rows, queries, keys, images = shape[0], shape[-2], shape[-1], recorded.batch.images
    are_images = rows == images if len(shape) == 4 else rows % images == 0 and len(shape) == 3
    return are_images and queries == keys and _find_layout((images, keys, 1), recorded) is not None


def _find_layout(shape: Sequence[int], recorded: Recorded, module: nn.Module | None = None) -> Layout | None:
    batch, patches = recorded.batch, find_patches(recorded.modules)
    if module is None:
        return find_layout(shape, batch.size, None, batch.images, patches=patches)
    return Axes(recorded.model, batch, patches).find_layout(shape, module)


def _all_over_the_picture(log: AttentionLog, recorded: Recorded) -> list[Sighting]:
    sightings = log.sightings
    if not sightings:
        raise cannot_follow(recorded, UNSEEN)
    fitting = [index for index, each in enumerate(sightings) if is_over_picture(each.shape, recorded)]
    found = sightings[: fitting[-1] + 1] if fitting else sightings
    for index, sighting in enumerate(found):
        if index not in fitting:
            raise cannot_follow(recorded, _misfit(sighting, recorded.batch))
    counts = list(dict.fromkeys(sighting.keys for sighting in found))
    if len(counts) > 1:
        raise cannot_follow(recorded, f"the number of tokens changes from {' to '.join(map(str, counts))}")
    return found


def find_last(log: AttentionLog, recorded: Recorded) -> tuple[int, Layout]:
    """The number of the last attention whose keys are tokens of the picture, and how these lie on it. Its queries are the
    same tokens, or others: a class token, or the probe of a pooling by attention. Raises `ModelError` where there is
    none."""
    images = recorded.batch.images
    for number, sighting in reversed(list(enumerate(log.sightings))):
        rows = sighting.shape[0]
        are_images = rows == images if len(sighting.shape) == 4 else rows % images == 0 and len(sighting.shape) == 3
        layout = _find_layout((images, sighting.keys, 1), recorded) if are_images else None
        if layout is not None:
            return number, _put_in_order(layout, sighting.keys, log, recorded)
    raise cannot_follow(recorded, _misfit(log.sightings[-1], recorded.batch) if log.sightings else UNSEEN)


def find_attended(log: AttentionLog, number: int) -> Attended | None:
    """That attention as it was computed, if it is kept."""
    return next((found for found in log.attended if found.number == number), None)


def know_last(log: AttentionLog, number: int, recorded: Recorded) -> None:
    """Remember, for all passes to come, that this attention was the last over the picture."""
    running = log.sightings[number].running
    _last.add(log.modules[running[-1]] if running else recorded.model)


def find_around(found: Attended, log: AttentionLog, recorded: Recorded) -> tuple[Running, Layout] | None:
    """The outermost module that ran around this attention and no other, and gave its tokens; None where there is none."""
    others = {name for number, other in enumerate(log.sightings) if number != found.number for name in other.running}
    for running in found.around:
        output = running.output
        if running.name in others or output is None or output.ndim != 3:
            continue
        layout = _find_layout(output.shape, recorded, running.module)
        if layout is not None and output.shape[1 - layout.image_axis] == found.key.shape[-2]:
            return running, layout
    return None


def _misfit(sighting: Sighting, batch: Batch) -> str:
    shape = f"the attention in '{sighting.where}' is {sighting.shape}"
    if sighting.shape[-2] != sighting.keys:
        return f"{shape}: its queries and keys are different tokens (cross-attention, or pooled keys)"
    if sighting.shape[0] != batch.images or len(sighting.shape) > 4:
        return f"{shape} for {batch.images} image(s): it covers only windows, or another part of each image"
    size = " x ".join(map(str, batch.size))
    return f"{shape}, and {sighting.keys} tokens form no grid on images of {size} (it may be channel attention)"


def _owner(attentions: Sequence[Sighting], index: int, log: AttentionLog, recorded: Recorded) -> str:
    """The outermost module that ran around this attention and no other, and gave tokens."""
    tokens = attentions[index].keys
    others = {name for number, other in enumerate(attentions) if number != index for name in other.running}
    for name in attentions[index].running:
        shape = log.outputs.get(name, ())
        if name in others or len(shape) != 3:
            continue
        layout = _find_layout(shape, recorded, log.modules[name])
        if layout is not None and shape[1 - layout.image_axis] == tokens:
            return name
    why = f"no module around '{attentions[index].where}' contains only this attention and returns its {tokens} tokens"
    raise cannot_follow(recorded, f"{why}, as a block does")


def cannot_follow(recorded: Recorded, why: str) -> ModelError:
    """The error for a model whose attention does not lead back to the picture."""
    return ModelError(
        f"The attention of {type(recorded.model).__name__} cannot be traced back to the image: {why}. "
        "Choose a method that explains a layer, such as 'gradcam'."
    )


def plain(probabilities: Tensor) -> Tensor:
    """Nothing is recorded."""
    return probabilities


def differentiable(probabilities: Tensor) -> Tensor:
    """Recorded from here on: the first block's become a leaf that requires gradients, and later ones depend on it."""
    if not probabilities.requires_grad:
        probabilities = probabilities.detach().requires_grad_()
    torch.set_grad_enabled(True)
    return probabilities


@contextlib.contextmanager
def attention_kept(blocks: Blocks, recorded: Recorded, keep: Keep) -> Iterator[list[Tensor]]:
    """Around runs of the model: a list that gets the attention (N,heads,T,T) of each block, as `keep` gives it.

    The backward pass belongs in here too: a checkpoint repeats blocks there, which then have to compute what they did
    before, in this thread, whose attention is the one that is met. An attention takes N heads T T numbers for each block,
    1.8 MB for an image and a block of ViT-B/16; what is recorded behind it for autograd takes as much as a step of training.
    """
    batch, found = recorded.batch, list[Tensor]()

    def meet(shape: tuple[int, ...]) -> Keep | None:
        return take if shape[-1] == blocks.tokens and is_over_picture(shape, recorded) else None

    def take(probabilities: Tensor) -> Tensor:
        by_head = probabilities if probabilities.ndim == 4 else probabilities.unflatten(0, (batch.images, -1))
        kept = keep(by_head)
        if not is_backward_running():
            found.append(kept)
        return kept.view_as(probabilities)

    with AttentionPatch(meet), torch.autograd.set_multithreading_enabled(False):
        yield found


def require_all(attentions: list[Tensor], blocks: Blocks) -> None:
    """Raises `ModelError` where there is not one attention for each block."""
    if len(attentions) != len(blocks.modules):
        raise ModelError(
            f"The model's {len(blocks.modules)} blocks computed {len(attentions)} attentions in the second pass, expected "
            "one per block: the two passes differ. Choose a method that explains a layer, such as 'gradcam'."
        )
