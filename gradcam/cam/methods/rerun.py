"""The model, or the part of it behind a layer, run again on variants: many at a time where that is right.

A hook on the layer may hand on a batch of another size than came, so that the front runs once and the tail alone runs for
each variant. That is right if the tail treats rows alike. The first batch shows it: in it are two unchanged copies, which
have to give what the plain pass gave, each beside one unlike all others, which would show in it if rows were mixed.
Where it is not right, the whole batch is repeated; and where rows are mixed then too, variants run one by one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.forward import Recorded
from gradcam.cam.grid import BlindPatchesError, GridActivations, at_least_float32
from gradcam.errors import BlindLayerError, LayerError, TargetError
from gradcam.hooks import pytorch
from gradcam.hooks.hooks import Hooks, is_owned, swap_contents
from gradcam.hooks.memory import Meter, RerunBudget
from gradcam.hooks.nested import (
    LayerInput,
    floating_by_keys,
    replace_tensor,
    take_inputs,
    take_rows,
    tensors,
)
from gradcam.layers.find import Outlet
from gradcam.targets.classes import ClassTarget, compute_scores

STRANGE = 100.0  # a factor that no model leaves without consequence
GUARDS = 4  # rows of the first chunk: an unchanged one at each end, and beside it, towards the middle, a strange one
FEWEST = GUARDS + 1


@dataclass(frozen=True)
class Chunk:
    """One batch of so many rows for each image: the variants of these numbers, the rest of them unchanged."""

    numbers: range
    rows: int
    is_guarded: bool = False

    @property
    def positions(self) -> range:
        start = GUARDS // 2 if self.is_guarded else 0
        return range(start, start + len(self.numbers))


@dataclass(frozen=True)
class Variants:
    """`count` variants of `base` (N,...), images first. `change(copies, numbers)`: make copies (v*N,...), of which
    v*N+n is image n, the variants of these numbers, in place."""

    base: Tensor
    count: int
    change: Callable[[Tensor, range], None]

    @property
    def bytes_each(self) -> int:
        return self.base.numel() * self.base.element_size()

    def make(self, chunk: Chunk) -> Tensor:
        """A chunk's rows, flattened (rows*N,...)."""
        stack = self.base.expand(chunk.rows, *self.base.shape).clone(memory_format=torch.contiguous_format)
        if chunk.is_guarded:
            # Of both signs: whatever a model takes over its rows, the largest or the least, one of them stands out.
            stack[1].mul_(-STRANGE).sub_(1)
            stack[-2].mul_(STRANGE).add_(1)
        if chunk.numbers:
            self.change(stack[chunk.positions.start : chunk.positions.stop].flatten(0, 1), chunk.numbers)
        return stack.flatten(0, 1)


def divide(count: int, most: int) -> list[Chunk]:
    """`count` variants in as few chunks as have `most` rows each or fewer, `FEWEST` at least; the first guarded."""
    chunks = -(-(count + GUARDS) // most)
    rows = max(-(-(count + GUARDS) // chunks), FEWEST)
    first = min(rows - GUARDS, count)
    rest = (range(start, min(start + rows, count)) for start in range(first, count, rows))
    return [Chunk(range(first), rows, is_guarded=True), *(Chunk(numbers, rows) for numbers in rest)]


@dataclass(frozen=True)
class VariantScores:
    """Scores of variants (V,N,K), and of what is unchanged (N,K), from a batch of the same size."""

    values: Tensor
    plain: Tensor


@dataclass(frozen=True)
class _Way:
    """How variants, flattened, with so many rows for each image, become the model's output; and what one takes."""

    run: Callable[[Tensor, int], Any]
    bytes_each: Callable[[], int]


def score_layer(recorded: Recorded, site: GridActivations, variants: Variants, budget: RerunBudget) -> VariantScores:
    """Scores of variants of a layer's output; `variants.base` is `layer_output(site)`. Raises `GradcamError` where not
    even one fits into the memory budget."""
    layout, outlet = site.layout, recorded.outlets[site.layer]

    def run_tail(rows: Tensor, count: int) -> Any:
        with _handed_on(outlet, layout.from_rows(rows), site.recorded.shape):
            return run_again(recorded, budget, 1)

    def run_all(rows: Tensor, count: int) -> Any:
        rows = layout.from_rows(rows)
        with _handed_on(outlet, rows, rows.shape):
            return run_again(recorded, budget, count)

    tail = budget.meter.peak(outlet.module)
    ways = [
        _Way(run_tail, lambda: 2 * variants.bytes_each + tail),
        _Way(run_all, lambda: 2 * variants.bytes_each + _measure(recorded, budget)),
    ]
    return _score(recorded, variants, ways, budget)


def score_input(recorded: Recorded, variants: Variants, budget: RerunBudget) -> VariantScores:
    """Scores of variants of the pictures; `variants.base` is `budget.batch.pictures`. Raises as `score_layer` does."""

    def run(rows: Tensor, count: int) -> Any:
        return run_again(recorded, budget, count, rows)

    def run_channels_last(rows: Tensor, count: int) -> Any:
        return run_again(recorded, budget, count, rows.contiguous(memory_format=torch.channels_last))

    needed = _measure(recorded, budget)
    ways = [_Way(run, lambda: 3 * variants.bytes_each + needed)]
    # A convolution on the processor takes less time for them, though not every model can do with them.
    if variants.base.device.type == "cpu" and variants.base.ndim == 4:
        ways.insert(0, _Way(run_channels_last, lambda: 4 * variants.bytes_each + needed))
    return _score(recorded, variants, ways, budget)


def layer_output(site: GridActivations) -> Tensor:
    """A layer's output as it was recorded, but images first."""
    return site.layout.to_rows(site.recorded.detach())


def require_effect(found: VariantScores, site: GridActivations, recorded: Recorded) -> None:
    """Raises `LayerError` where no variant of a layer's output changes any score by more than rounding does."""
    if not len(found.values) or not site.grid.any():  # of nothing there are no other variants
        return
    rounding = 4 * torch.finfo(found.plain.dtype).eps * found.plain.abs().amax()
    if (found.values - found.plain).abs().amax() <= rounding:
        said = f"Changes on the grid of layer '{site.layer}' do not reach the score."
        if "tokens" in site.layout.kind:
            raise BlindPatchesError(said)
        raise BlindLayerError(f"{said} Choose another layer, or explain the logit.")


def _score(recorded: Recorded, variants: Variants, ways: Sequence[_Way], budget: RerunBudget) -> VariantScores:
    for way in ways:
        bytes_each = way.bytes_each()
        if way is ways[0]:
            budget.require_one(bytes_each)
        most = budget.fitting(bytes_each)
        found = _score_together(recorded, variants, way, budget, most) if most >= FEWEST else None
        if found is not None:
            return found
    return _score_one_by_one(recorded, variants, ways[-1], budget)


def _score_together(
    recorded: Recorded, variants: Variants, way: _Way, budget: RerunBudget, most: int
) -> VariantScores | None:
    parts: list[Tensor] = []
    plain = recorded.scored.values.detach()
    for chunk in divide(variants.count, most):
        rows = variants.make(chunk)
        if chunk.is_guarded:
            try:
                output = way.run(rows, chunk.rows)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a model raises for a batch of another size than it was given
                return None
            if output is None or not reproduces_plain(recorded, output, chunk.rows):
                return None
            (plain,) = score_rows(recorded, output, chunk.rows, range(1))
        else:
            output = way.run(rows, chunk.rows)
        parts.append(score_rows(recorded, output, chunk.rows, chunk.positions))
        budget.report(chunk.numbers.stop, variants.count)
    return VariantScores(torch.cat(parts), plain)


def _score_one_by_one(recorded: Recorded, variants: Variants, way: _Way, budget: RerunBudget) -> VariantScores:
    parts = []
    for number in range(variants.count):
        output = way.run(variants.make(Chunk(range(number, number + 1), 1)), 1)
        parts.append(score_rows(recorded, output, 1, range(1)))
        budget.report(number + 1, variants.count)
    plain = recorded.scored.values.detach()
    return VariantScores(torch.cat(parts) if parts else plain[None][:0], plain)


def _measure(recorded: Recorded, budget: RerunBudget) -> int:
    meter = Meter()
    with meter:
        meter.mark("all of it")
        run_again(recorded, budget, 1)
    return meter.peak("all of it")


def run_again(recorded: Recorded, budget: RerunBudget, count: int, pictures: Tensor | None = None) -> Any:
    """The model's output for so many copies of the batch, with other pictures if they are given."""
    images = budget.batch.images

    def repeat(tensor: Tensor) -> Tensor:
        is_of_images = tensor.ndim > 0 and len(tensor) == images
        return tensor.repeat(count, *[1] * (tensor.ndim - 1)) if is_of_images else tensor.clone()

    batch = budget.batch.copy(repeat, pictures)
    device, autocast = recorded.scored.values.device.type, recorded.autocast
    with pytorch.autocast(device, autocast):
        return batch.run(recorded.model)


@contextlib.contextmanager
def _handed_on(outlet: Outlet, rows: Tensor, expected: torch.Size) -> Iterator[None]:
    """Whatever the module gives there, `rows` go on in its place, under all its names."""
    inputs: list[LayerInput] = []
    runs = itertools.count()
    swapped: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs[:], arguments = take_inputs(args, kwargs)
        return arguments

    def hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if next(runs) != (outlet.run or 0):
            return None
        tensor = floating_by_keys(output).get(outlet.keys)
        if tensor is None or tensor.shape != expected:
            got = "no floating tensor" if tensor is None else tuple(tensor.shape)
            raise LayerError(
                f"The layer returned {got} in the second pass, expected {tuple(expected)} as in the first."
            )
        if is_owned(tensor, module) or any(each.given is tensor and not each.is_changed for each in inputs):
            return replace_tensor(output, tensor, rows)  # what else uses it goes on as it came
        other = rows.detach()
        if swap_contents(tensor, other):
            swapped.append((tensor, other))
        elif tensor.shape == rows.shape:
            tensor.copy_(rows)
        else:
            raise LayerError(
                "The layer's output shares memory with other tensors, so its batch size cannot grow. Choose another layer."
            )
        return None

    with Hooks() as hooks:
        hooks.before_forward(outlet.module, keep)
        hooks.after_forward(outlet.module, hand_on)
        yield
    for tensor, other in swapped:  # the tensor may be the model's own, kept for the next pass
        swap_contents(tensor, other)


def score_rows(recorded: Recorded, output: Any, count: int, positions: range) -> Tensor:
    """The scores (v,N,K) of the variants at these positions, of so many that are in the output."""
    scored, images = recorded.scored, recorded.batch.images
    if isinstance(scored.target, ClassTarget):
        logits = scored.target.find_logits(output, count * images).unflatten(0, (count, images))
        logits = logits[positions.start : positions.stop]
        target = scored.target.repeat(len(positions))
        return target.compute(logits.flatten(0, 1)).unflatten(0, (len(positions), images))
    parts = []
    for position in positions:
        rows = slice(position * images, (position + 1) * images)
        part = take_rows(output, rows, count * images) if count > 1 else output
        parts.append(compute_scores(scored.target, part, images).values)
    return torch.stack(parts) if parts else scored.values.detach()[None][:0]


def reproduces_plain(recorded: Recorded, output: Any, count: int) -> bool:
    """Whether there are rows for each variant, of which the first and the last ones are those of the plain pass."""
    images = recorded.batch.images
    if recorded.scored.logits is not None:
        plain = [recorded.scored.logits.detach()]
        try:
            found = [recorded.scored.target.find_logits(output, count * images)]
        except TargetError:
            return False
    else:
        plain, found = tensors(recorded.output), tensors(output)
    if len(plain) != len(found):
        return False
    slack = recorded.slack
    return all(_has_rows(one, other, images, count, slack) for one, other in zip(plain, found))


def _has_rows(plain: Tensor, found: Tensor, images: int, count: int, slack: float) -> bool:
    if plain.ndim == 0 or len(plain) != images or found.shape != (count * images, *plain.shape[1:]):
        return False
    if not plain.is_floating_point():
        return True
    plain, found = at_least_float32(plain.detach()), at_least_float32(found)
    allowed = slack * plain.abs().amax()
    return all(bool((rows - plain).abs().amax() <= allowed) for rows in (found[:images], found[-images:]))
