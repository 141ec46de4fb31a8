"""Rerun the model, or the part after a layer, on changed copies (variants) of its input or of the layer's output.

If possible, a batch contains many variants. To rerun only the part after a layer (the tail), a hook replaces the
layer's output by a batch of variants. The part before the layer runs on the images once for each batch of variants. The
scores are correct if the tail computes each row of a batch independently. The first batch tests this condition. It
contains two unchanged copies, which have to reproduce the recorded pass. Next to each unchanged copy is a row with
extreme values, which would change the copy if the tail mixed rows. If the test fails, the entire model runs on a batch
with the images repeated for each variant. If this batch fails the test too, variants run one by one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradcam.cam.forward import RecordedPass
from gradcam.cam.grid import BlindPatchesError, GridActivations
from gradcam.errors import BlindLayerError, LayerError, TargetError
from gradcam.hooks import containers, pytorch
from gradcam.hooks.containers import at_least_float32
from gradcam.hooks.hooks import Hooks, is_parameter_or_buffer
from gradcam.hooks.memory import Meter, RerunBudget
from gradcam.layers.find import LayerRef
from gradcam.targets.classes import ClassTarget, compute_scores

GUARD_SCALE = 100.0  # A factor for extreme values, large enough to change the output of any model.
NUM_GUARD_ROWS = 4  # The first batch has four more rows per image: two unchanged rows and two extreme rows.
MIN_ROWS = NUM_GUARD_ROWS + 1


@dataclass(frozen=True)
class Chunk:
    """A batch with `rows` rows per image: the variants with these `numbers`, filled up with unchanged rows.

    If `is_guarded` is True, the batch also has guard rows: an unchanged row and an extreme row at each end.
    """

    numbers: range
    rows: int
    is_guarded: bool = False

    @property
    def positions(self) -> range:
        start = NUM_GUARD_ROWS // 2 if self.is_guarded else 0
        return range(start, start + len(self.numbers))


@dataclass(frozen=True)
class Variants:
    """A description of `count` changed copies (variants) of the tensor `base` (N,...).

    `change(copies, numbers)` changes copies (v*N,...) in place into the variants with these numbers. Row v*N+n belongs
    to image n.
    """

    base: Tensor
    count: int
    change: Callable[[Tensor, range], None]

    def make(self, chunk: Chunk) -> Tensor:
        """Return the rows of a chunk, flattened to (rows*N,...)."""
        stack = self.base.expand(chunk.rows, *self.base.shape).clone(memory_format=torch.contiguous_format)
        if chunk.is_guarded:
            # If the tail takes a maximum or minimum over rows, one of the two extreme rows dominates, because their
            # signs differ.
            stack[1].mul_(-GUARD_SCALE).sub_(1)
            stack[-2].mul_(GUARD_SCALE).add_(1)
        if chunk.numbers:
            self.change(stack[chunk.positions.start : chunk.positions.stop].flatten(0, 1), chunk.numbers)
        return stack.flatten(0, 1)


def plan_chunks(count: int, max_rows: int) -> list[Chunk]:
    """Divide `count` variants into as few chunks (batches) as possible, with `MIN_ROWS` to `max_rows` rows each.

    Only the first chunk has guard rows.
    """
    chunks = -(-(count + NUM_GUARD_ROWS) // max_rows)
    rows = max(-(-(count + NUM_GUARD_ROWS) // chunks), MIN_ROWS)
    first = min(rows - NUM_GUARD_ROWS, count)
    later_numbers = (range(start, min(start + rows, count)) for start in range(first, count, rows))
    return [Chunk(range(first), rows, is_guarded=True), *(Chunk(numbers, rows) for numbers in later_numbers)]


# The scores (V,N,K) of the variants, and the scores (N,K) of the unchanged images from a batch of the same size.
VariantScores = tuple[Tensor, Tensor]
# A function of flattened variants and their number per image. It returns the model's output.
Run = Callable[[Tensor, int], Any]
# A function that runs variants, and a function that measures the bytes per variant.
RerunStrategy = tuple[Run, Callable[[], int]]


def score_layer(
    recorded: RecordedPass, site: GridActivations, variants: Variants, budget: RerunBudget
) -> VariantScores:
    """Return the scores of variants of a layer's output; `variants.base` is `layer_output(site)`.

    Raises `LayerError` if no variant changes any score by more than rounding, and `GradcamError` if the memory budget
    is too small for one variant.
    """
    layout, outlet = site.layout, recorded.outlets[site.layer]

    def run_tail(rows: Tensor, count: int) -> Any:
        with _replace_output(outlet, layout.from_rows(rows), site.recorded.shape):
            return run_again(recorded, budget, 1)

    def run_model(rows: Tensor, count: int) -> Any:
        rows = layout.from_rows(rows)
        with _replace_output(outlet, rows, rows.shape):
            return run_again(recorded, budget, count)

    tail = budget.meter.peak(outlet.module)
    strategies: list[RerunStrategy] = [
        (run_tail, lambda: 2 * variants.base.nbytes + tail),
        (run_model, lambda: 2 * variants.base.nbytes + _measure(recorded, budget)),
    ]
    values, unchanged = _score(recorded, variants, strategies, budget)
    _require_effect(values, unchanged, site)
    return values, unchanged


def score_input(recorded: RecordedPass, variants: Variants, budget: RerunBudget) -> VariantScores:
    """Return the scores of variants of the images; `variants.base` is `budget.batch.pictures`.

    Raises `GradcamError` if the memory budget does not hold a single variant.
    """

    def run(rows: Tensor, count: int) -> Any:
        return run_again(recorded, budget, count, rows)

    def run_channels_last(rows: Tensor, count: int) -> Any:
        return run_again(recorded, budget, count, rows.contiguous(memory_format=torch.channels_last))

    pass_bytes = _measure(recorded, budget)
    strategies: list[RerunStrategy] = [(run, lambda: 3 * variants.base.nbytes + pass_bytes)]
    # On a CPU, convolutions are faster in the channels-last memory format, but not every model accepts this format.
    if variants.base.device.type == "cpu" and variants.base.ndim == 4:
        strategies.insert(0, (run_channels_last, lambda: 4 * variants.base.nbytes + pass_bytes))
    return _score(recorded, variants, strategies, budget)


def layer_output(site: GridActivations) -> Tensor:
    """Return a layer's recorded output, with the images moved to the first axis."""
    return site.layout.to_rows(site.recorded.detach())


def _require_effect(scores: Tensor, unchanged: Tensor, site: GridActivations) -> None:
    """Raise `LayerError` if no variant of a layer's output changes any score by more than rounding."""
    # If there are no variants, or all activations are zero, no score can change.
    if not len(scores) or not site.grid.any():
        return
    rounding = 4 * torch.finfo(unchanged.dtype).eps * unchanged.abs().amax()
    if (scores - unchanged).abs().amax() <= rounding:
        problem = f"The score does not change if the grid of layer '{site.layer}' is changed."
        if "tokens" in site.layout.kind:
            raise BlindPatchesError(problem)
        raise BlindLayerError(f"{problem} Choose another layer, or explain the logit.")


def _score(
    recorded: RecordedPass, variants: Variants, strategies: Sequence[RerunStrategy], budget: RerunBudget
) -> VariantScores:
    for number, (run, measure_bytes) in enumerate(strategies):
        bytes_per_variant = measure_bytes()
        if number == 0:
            budget.require_one(bytes_per_variant)
        max_rows = budget.fitting(bytes_per_variant)
        chunks = plan_chunks(variants.count, max_rows) if max_rows >= MIN_ROWS else []
        if chunks and (scores := _score_chunks(recorded, variants, run, budget, chunks)) is not None:
            return scores
    chunks = [Chunk(range(number, number + 1), 1) for number in range(variants.count)]
    # `_score_chunks` returns None only for guarded chunks, and these chunks are not guarded.
    return cast("VariantScores", _score_chunks(recorded, variants, run, budget, chunks))


def _score_chunks(
    recorded: RecordedPass, variants: Variants, run: Run, budget: RerunBudget, chunks: Sequence[Chunk]
) -> VariantScores | None:
    """Return the scores of all chunks; None if the first chunk fails, or its guard rows show that rows are mixed."""
    parts, unchanged = [], recorded.scored.values.detach()
    for chunk in chunks:
        try:
            output = run(variants.make(chunk), chunk.rows)
        except Exception as error:  # The model may raise any error for a batch of a different size.
            if isinstance(error, torch.OutOfMemoryError) or not chunk.is_guarded:
                raise
            return None
        if chunk.is_guarded:
            if output is None or not reproduces_first_pass(recorded, output, chunk.rows):
                return None
            (unchanged,) = score_rows(recorded, output, chunk.rows, range(1))
        parts.append(score_rows(recorded, output, chunk.rows, chunk.positions))
        budget.report(chunk.numbers.stop, variants.count)
    return torch.cat(parts) if parts else unchanged[None][:0], unchanged


def _measure(recorded: RecordedPass, budget: RerunBudget) -> int:
    with Meter() as meter:
        meter.mark("all of it")
        run_again(recorded, budget, 1)
    return meter.peak("all of it")


def run_again(recorded: RecordedPass, budget: RerunBudget, count: int, pictures: Tensor | None = None) -> Any:
    """Return the model's output for `count` copies of the batch. If `pictures` is passed, it replaces the images."""
    images = budget.batch.images

    def repeat(tensor: Tensor) -> Tensor:
        has_image_rows = tensor.ndim > 0 and len(tensor) == images
        return tensor.repeat(count, *[1] * (tensor.ndim - 1)) if has_image_rows else tensor.clone()

    batch = budget.batch.copy(repeat, pictures)
    with pytorch.autocast(recorded.scored.values.device.type, recorded.autocast):
        return batch.run(recorded.model)


@contextlib.contextmanager
def _replace_output(outlet: LayerRef, rows: Tensor, expected: torch.Size) -> Iterator[None]:
    """Replace a module's output by `rows`, also for other references to the output tensor."""
    inputs, runs, swapped = list[Any](), itertools.count(), list[tuple[Tensor, Tensor]]()

    def record_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs[:], arguments = containers.copy_inputs(args, kwargs)
        return arguments

    def hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if next(runs) != (outlet.run or 0):
            return None
        tensor = containers.floating_tensors_by_keys(output).get(outlet.keys)
        if tensor is None or tensor.shape != expected:
            description = "no floating-point tensor" if tensor is None else tuple(tensor.shape)
            raise LayerError(
                f"The layer returned {description} in the second pass, expected {tuple(expected)} as in the first pass."
            )
        is_input = any(layer_input.given is tensor and not layer_input.is_changed for layer_input in inputs)
        if is_input or is_parameter_or_buffer(tensor, module):
            # Other users of this tensor must get the original values.
            return containers.replace_tensor(output, tensor, rows)
        replacement = rows.detach()
        if containers.swap_contents(tensor, replacement):
            swapped.append((tensor, replacement))
        elif tensor.shape == rows.shape:
            tensor.copy_(rows)
        else:
            raise LayerError(
                "The layer's output shares memory with other tensors, so the method cannot replace it with a larger "
                "batch. Choose another "
                "layer."
            )
        return None

    with Hooks() as hooks:
        hooks.before_forward(outlet.module, record_inputs)
        hooks.after_forward(outlet.module, hand_on)
        yield
    for tensor, replacement in swapped:  # Swap the contents back, because the model may keep the tensor object.
        containers.swap_contents(tensor, replacement)


def score_rows(recorded: RecordedPass, output: Any, count: int, positions: range) -> Tensor:
    """Return the scores (v,N,K) of the variants at these positions of an output with `count` variants."""
    scored, images = recorded.scored, recorded.batch.images
    if isinstance(scored.target, ClassTarget):
        logits = scored.target.find_logits(output, count * images).unflatten(0, (count, images))
        logits = logits[positions.start : positions.stop]
        target = scored.target.repeat(len(positions))
        return target.compute(logits.flatten(0, 1)).unflatten(0, (len(positions), images))
    parts = []
    for position in positions:
        rows = slice(position * images, (position + 1) * images)
        variant_output = containers.take_rows(output, rows, count * images) if count > 1 else output
        parts.append(compute_scores(scored.target, variant_output, images).values)
    return torch.stack(parts) if parts else scored.values.detach()[None][:0]


def reproduces_first_pass(recorded: RecordedPass, output: Any, count: int) -> bool:
    """Return whether the output has rows for each variant, and the first and last rows equal the recorded pass."""
    images = recorded.batch.images
    if recorded.scored.logits is not None:
        recorded_outputs = [recorded.scored.logits.detach()]
        try:
            outputs = [recorded.scored.target.find_logits(output, count * images)]
        except TargetError:
            return False
    else:
        recorded_outputs, outputs = containers.list_tensors(recorded.output), containers.list_tensors(output)
    return len(recorded_outputs) == len(outputs) and all(
        _has_rows(expected, tensor, images, count, recorded.tolerance)
        for expected, tensor in zip(recorded_outputs, outputs)
    )


def _has_rows(expected: Tensor, tensor: Tensor, images: int, count: int, tolerance: float) -> bool:
    if expected.shape[:1] != (images,) or tensor.shape != (count * images, *expected.shape[1:]):
        return False
    if not expected.is_floating_point():
        return True
    expected, tensor = at_least_float32(expected.detach()), at_least_float32(tensor)
    limit = tolerance * expected.abs().amax()
    return all(bool((rows - expected).abs().amax() <= limit) for rows in (tensor[:images], tensor[-images:]))
