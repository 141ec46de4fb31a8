"""Methods that follow a transformer's attention: rollout, gradient rollout and LeGrad from block to block, Grad-ECLIP into
the last one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradcam.cam.forward import Recorded, has_float16
from gradcam.cam.grid import at_least_float32
from gradcam.cam.methods.attention_capture import (
    Attended,
    AttentionLog,
    AttentionPatch,
    Blocks,
    Keep,
    Running,
    attention_kept,
    cannot_follow,
    differentiable,
    find_around,
    find_attended,
    find_blocks,
    find_last,
    know_last,
    plain,
    require_all,
)
from gradcam.cam.methods.rerun import reproduces_plain, run_again, score_rows
from gradcam.cam.readings import check_range
from gradcam.errors import BlindLayerError, ModelError
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import MOST_BYTES, jacobian, no_gradient, reached
from gradcam.hooks.hooks import Hooks, TargetLayer, recording_off, swap_contents
from gradcam.hooks.memory import RerunBudget
from gradcam.hooks.nested import first_floating, map_tensors, replace_tensor, tensors
from gradcam.layers.layout import Layout
from gradcam.targets.base import Scored
from gradcam.targets.classes import compute_scores

FEW = 4  # classes, for which gradients at all tokens cost less than another run of a block


def rollout(recorded: Recorded, log: AttentionLog, budget: RerunBudget) -> Tensor:
    """Attention rollout: how much of each patch is mixed into what the head reads; of no class.

    Maps (N,K,h,w), the same for all classes. Abnar & Zuidema, ACL 2020, equation 1: a block passes on half of a token and
    half of what it attends to, by the mean over the heads; blocks are multiplied. The map is the row of the token that the
    head reads, the class token as a rule; the mean of their rows where it reads several, as a mean over all patches
    does. Which it reads is seen from the gradient at the last block's output, and not taken from the model's kind.
    Raises `ModelError` where the attention cannot be followed, `BlindLayerError` where the score has no gradient.
    """
    blocks = find_blocks(log, recorded)
    with _rollout_run(recorded, blocks, budget, plain) as (scored, tokens, attentions):
        ((gradient,),) = _jacobian(recorded, _any_score(scored), [tokens])
    row = find_read(gradient, blocks)
    mixed = roll_out([at_least_float32(attention).mean(1) for attention in attentions], row)
    return blocks.to_grid(mixed)[:, None].repeat_interleave(recorded.scored.values.shape[1], 1)


def gradient_rollout(recorded: Recorded, log: AttentionLog, budget: RerunBudget) -> Tensor:
    """Gradient-weighted rollout: attention counts by how much more of it would raise the score.

    Maps (N,K,h,w), none below zero. Chefer et al., ICCV 2021, equations 5 and 6 for self-attention: from the identity on,
    R becomes R + A R in each block, where A is the mean over the heads of attention times its gradient, positive ones only.
    The map is a row of R, as in `rollout`; the identity, which would add the same to every patch that the head reads, is
    taken away again.
    Raises `ModelError` where the attention cannot be followed, `BlindLayerError` where its gradient is exactly zero.
    """
    blocks = find_blocks(log, recorded)
    parts = []
    with _rollout_run(recorded, blocks, budget, differentiable) as (scored, tokens, attentions):
        for at_tokens, *gradients in _jacobian(recorded, scored.values, [tokens, *attentions]):
            row = find_read(at_tokens, blocks)
            weighted = [weigh(attention, each) for attention, each in zip(attentions, gradients)]
            parts.append(blocks.to_grid(accumulate(weighted, row)))
    return torch.cat(parts).transpose(0, 1)


def _jacobian(recorded: Recorded, scores: Tensor, inputs: Sequence[Tensor]) -> Iterator[Sequence[Tensor | None]]:
    yield from jacobian(scores, inputs, scaled=_is_scaled(recorded), most_bytes=MOST_BYTES // len(inputs))


def _is_scaled(recorded: Recorded) -> bool:
    return recorded.autocast == torch.float16 or has_float16(recorded.output, recorded.modules)


def roll_out(attentions: Sequence[Tensor], row: Tensor) -> Tensor:
    """A row (T,) times the product of blocks (N,T,T), of which the last is the first factor: (N,T). Each block is half
    of its attention and half of the identity, its rows divided by their sums."""
    values = row.to(attentions[0]).expand(len(attentions[0]), 1, -1)
    for attention in reversed(attentions):
        half = attention / 2 + torch.eye(len(row), dtype=attention.dtype, device=attention.device) / 2
        values = values @ (half / half.sum(-1, keepdim=True))
    return values[:, 0]


def accumulate(weighted: Sequence[Tensor], row: Tensor) -> Tensor:
    """A row (T,) times what blocks (...,T,T) add to the identity, the product of I + block for each, less I: (...,T)."""
    start = row.to(weighted[0]).expand(*weighted[0].shape[:-2], 1, -1)
    added = torch.zeros_like(start)  # apart from the start, beside which it may be too small for float32
    for block in reversed(weighted):
        added = added + (start @ block + added @ block)
    return added[..., 0, :]


def weigh(attention: Tensor, gradient: Tensor | None) -> Tensor:
    """The mean over the heads of attention (N,heads,T,T) times gradients (k,N,heads,T,T), positive ones only: (k,N,T,T)."""
    if gradient is None:
        return torch.zeros_like(at_least_float32(attention).mean(1))[None]
    check_range(gradient, "The gradients at the attention are")
    return (at_least_float32(gradient) * at_least_float32(attention.detach())).relu().mean(2)


def find_read(gradient: Tensor | None, blocks: Blocks) -> Tensor:
    """The tokens that the head reads, those with gradients (k,*shape) at the last block's output: (T,), alike, sum 1."""
    name, _ = blocks.last
    if gradient is None or not gradient.any():
        raise blind_attention(name)
    check_range(gradient, f"The gradients at layer '{name}' are")
    is_read = gradient.movedim(1 + blocks.token_axis, -1).flatten(0, -2).any(0)
    return at_least_float32(is_read.to(gradient.dtype)) / is_read.sum()


def blind_attention(name: str) -> BlindLayerError:
    """The error for a score that does not change with the tokens behind this block."""
    return BlindLayerError(
        f"The gradient at the last attention block, '{name}', is exactly zero. Possible causes: a head with zero weights, "
        "or a probability of exactly 0 or 1. Choose another score or class."
    )


@contextlib.contextmanager
def _rollout_run(
    recorded: Recorded, blocks: Blocks, budget: RerunBudget, keep: Keep
) -> Iterator[tuple[Scored, Tensor, list[Tensor]]]:
    """One more pass: its scores, the last block's output, and all blocks' attention, differentiable as it was kept."""
    name, last = blocks.last
    with attention_kept(blocks, recorded, keep) as attentions:
        with TargetLayer(last, name=name) as layer:
            output = run_again(recorded, budget, 1)
            scored = compute_scores(recorded.scored.target, output, recorded.batch.images)
            if not _any_score(scored).requires_grad:
                raise no_gradient([name])
        require_all(attentions, blocks)
        budget.report(1, 1)
        yield scored, layer.activations, attentions


def _any_score(scored: Scored) -> Tensor:
    """A number of each image (N,1) that depends on all of the output: no class of its own, as rollout is of none."""
    with torch.enable_grad():
        if scored.logits is None:
            return scored.values[:, :1]
        weights = torch.linspace(1, 2, scored.logits.shape[1], dtype=torch.float32, device="cpu").to(scored.logits)
        return (scored.logits * weights).sum(1, keepdim=True)


def legrad(recorded: Recorded, log: AttentionLog, budget: RerunBudget) -> Tensor:
    """LeGrad: where more attention would raise the score, in every block by itself.

    Maps (N,K,h,w), none below zero. Bousselham et al., ICCV 2025, equations 5 to 8: the score of a block is what the rest
    of the model behind the last block gives for this block's output; its positive gradients at the block's attention are
    averaged over heads and queries, and then over blocks. The authors' code for CLIP gives the head the mean of all
    tokens instead of what it reads, which for a class token is another score than the model's own.
    All blocks share one pass: their outputs go on behind the last block as one larger batch, where that is right.
    Raises `ModelError` where the attention cannot be followed, and where the head reads more than the last block;
    `BlindLayerError` where all gradients are exactly zero.
    """
    blocks = find_blocks(log, recorded)
    with attention_kept(blocks, recorded, differentiable) as attentions:
        found = _all_together(recorded, blocks, budget, attentions)
        return blocks.to_grid(_one_by_one(recorded, blocks, budget, attentions) if found is None else found)


def _all_together(recorded: Recorded, blocks: Blocks, budget: RerunBudget, attentions: list[Tensor]) -> Tensor | None:
    """(N,K,T), from one pass and one backward pass; None where the head does not treat the rows of a batch alike."""
    count = len(blocks.modules)
    shown = [count - 1, *range(count)]  # the last one twice, first and last: both have to give what the plain pass gave
    try:
        scores, output = _legrad_run(recorded, blocks, budget, attentions, shown)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a model raises for a batch of another size than it was given
        return None
    if not reproduces_plain(recorded, output, len(shown)):
        return None
    budget.report(1, 1)
    with torch.enable_grad():
        total = torch.stack(list(scores[1:])).sum(0)
    found, is_felt = _differentiate(recorded, total, attentions)
    return _require_felt(found / count, is_felt, blocks)


def _one_by_one(recorded: Recorded, blocks: Blocks, budget: RerunBudget, attentions: list[Tensor]) -> Tensor:
    found, count = [], len(blocks.modules)
    for block in range(count):
        scores, _ = _legrad_run(recorded, blocks, budget, attentions, [block])
        found.append(_differentiate(recorded, scores[0], attentions[block : block + 1]))
        budget.report(block + 1, count)
    total = torch.stack([values for values, _ in found]).mean(0)
    return _require_felt(total, any(is_felt for _, is_felt in found), blocks)


def _legrad_run(
    recorded: Recorded, blocks: Blocks, budget: RerunBudget, attentions: list[Tensor], shown: Sequence[int]
) -> tuple[Sequence[Tensor], Any]:
    """A pass in which the outputs of the `shown` blocks went on behind the last one: scores (N,K) of each, and the
    output. `attentions` become those of all blocks; through nothing but its own block's output does one reach a
    score."""
    attentions.clear()
    outputs: list[Tensor] = []
    gates: list[Tensor] = []  # what the next block gets in place of an output, where autograd ends
    joined: list[Node | None] = []

    def hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        tensor: Any = first_floating(output)  # of a block there is one
        outputs.append(tensor)
        if len(outputs) < len(blocks.modules):
            gates.append(tensor.detach().requires_grad_())
            goes_on = gates[-1].clone()  # which the next block may change in place
        else:
            goes_on = _join([outputs[block] for block in shown], blocks)
            joined.append(goes_on.grad_fn)
        if not swap_contents(tensor, goes_on):
            return replace_tensor(output, tensor, goes_on)
        outputs[-1] = goes_on  # which is what the block gave, now
        return None

    with recording_off(), Hooks() as hooks:
        for module in blocks.modules.values():
            hooks.after_forward(module, hand_on)
        output = run_again(recorded, budget, 1)
        require_all(attentions, blocks)
        scores = score_rows(recorded, output, len(shown), range(len(shown)))
        if not scores.requires_grad:
            raise no_gradient([blocks.last[0]])
        if _is_reached(gates, scores, without=joined[0]):
            raise ModelError(
                "The score also depends on earlier blocks through paths around the last attention block, "
                f"'{blocks.last[0]}', so another block's output cannot replace the last one's: choose "
                "'gradient-rollout' or 'rollout'."
            )
        return scores.unbind(), output


def _join(outputs: Sequence[Tensor], blocks: Blocks) -> Tensor:
    for shape in (tuple(output.shape) for output in outputs if output.shape != blocks.shape):
        raise ModelError(
            f"An attention block returns {shape}, but the last block returns {blocks.shape}, so one output cannot replace "
            "the other: choose 'gradient-rollout' or 'rollout'."
        )
    return torch.cat(list(outputs), blocks.layout.image_axis)


def _is_reached(leaves: Sequence[Tensor], scores: Tensor, *, without: Node | None) -> bool:
    wanted = {pytorch.find_edge(leaf).node for leaf in leaves}
    found = [scores.grad_fn]
    seen = {without, *found}
    for node in found:  # which grows on the way
        for other, _ in () if node is None else node.next_functions:
            if other not in seen:
                seen.add(other)
                found.append(other)
    return not wanted.isdisjoint(seen)


def _differentiate(recorded: Recorded, scores: Tensor, attentions: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """The sum over attentions of positive gradients of scores (N,K), as (N,K,T); and whether there are any gradients."""
    parts, is_felt = [], False
    for gradients in _jacobian(recorded, scores, attentions):
        found = [at_least_float32(gradient) for gradient in gradients if gradient is not None]
        for gradient in found:
            is_felt = check_range(gradient, "The gradients at the attention are") != (0, 0) or is_felt
        parts.append(torch.stack([gradient.relu().mean((2, 3)) for gradient in found]).sum(0))
    return torch.cat(parts).transpose(0, 1), is_felt


def _require_felt(values: Tensor, is_felt: bool, blocks: Blocks) -> Tensor:
    if not is_felt:
        raise blind_attention(blocks.last[0])
    return values


def grad_eclip(recorded: Recorded, log: AttentionLog, budget: RerunBudget) -> Tensor:
    """Grad-ECLIP: what the last attention takes from each patch, by what its channels are worth to the score.

    Maps (N,K,h,w), none below zero. Zhao et al., ICML 2024: at a patch i the map is ReLU(sum over channels c of
    w_c lambda_i v_ic). v are the attention's values; w is the score's gradient at what the class token takes from them, its
    output of all heads before their projection; lambda is loosened attention, the cosine of the class token's query and the
    patch's key over all heads, from 0 for the least of the patches to 1 for the largest. The softmax, which leaves
    little to any but a few patches, is not in it.
    In place of the class token are all queries that the head reads, whose maps are added up before the ReLU: the probe of
    a pooling by attention, whose keys are the tokens of the last block, or all patches behind a mean over them. The
    authors' code runs the last attention with a single head, which is another model than most; here it is the model's.
    It takes the plain pass alone, but for the first time with a model, which takes another to find the last attention.
    Raises `ModelError` where there is no attention over the picture, `BlindLayerError` where the gradient is exactly zero.
    """
    number, layout = find_last(log, recorded)
    found, scores = find_attended(log, number), recorded.scored.values
    if found is None or not scores.requires_grad or not reached(scores, [found.output])[0]:
        know_last(log, number, recorded)
        log, found, scores = _attend_again(recorded, budget, number)
    budget.report(1, 1)
    looseness = loosen(_by_head(found.query, recorded), _by_head(found.key, recorded), layout)
    values = _by_head(found.value, recorded)[..., layout.list_cells(), :]
    parts, shares, is_felt = [], [], False
    # A checkpoint repeats in the backward pass what is behind the attention, and has to find it as it was.
    repeated = AttentionLog().taken(found.around[-1].module if found.around else recorded.model)
    with repeated, torch.autograd.set_multithreading_enabled(False):
        for gradient, row in _at_queries(recorded, found, log, scores):
            is_felt = check_range(gradient, "The gradients at the last attention are") != (0, 0) or is_felt
            rows = slice(None) if row is None else slice(row, row + 1)
            slopes = _join_heads(gradient)
            worth = slopes @ _join_heads(values).transpose(-2, -1)
            share = (slopes * _join_heads(_by_head(found.output.detach(), recorded))[:, rows]).abs().sum((-2, -1))
            shares.append(share)
            parts.append((worth * looseness[:, rows]).sum(-2).relu().unflatten(-1, layout.grid))
    if not is_felt:
        raise blind_attention(log.sightings[number].where)
    # Where the attention's output would have to change many times over to change the score, there is rounding alone: of a
    # picture's likeness to itself, say.
    is_rounding = torch.cat(shares) <= recorded.score_slack * scores.detach().abs().T
    return torch.cat(parts).masked_fill(is_rounding[..., None, None], 0).transpose(0, 1)


def loosen(query: Tensor, key: Tensor, layout: Layout) -> Tensor:
    """Cosines (N,Q,P) of queries (N,heads,Q,d) and the keys of patches among (N,heads,T,d), over all heads: for each query
    from 0, where they are least, to 1; 1 where all are the same."""
    queries = torch.nn.functional.normalize(_join_heads(query), dim=-1)
    keys = torch.nn.functional.normalize(_join_heads(key)[:, layout.list_cells()], dim=-1)
    cosines = queries @ keys.transpose(-2, -1)
    least, most = cosines.aminmax(dim=-1, keepdim=True)
    return torch.where(most > least, (cosines - least) / (most - least), torch.ones_like(cosines))


def _join_heads(tensor: Tensor) -> Tensor:
    """(...,heads,T,d) as (...,T,heads*d)."""
    return at_least_float32(tensor).transpose(-3, -2).flatten(-2)


def _by_head(tensor: Tensor, recorded: Recorded, ndim: int = 4) -> Tensor:
    """Tokens of images, or gradients at them, as (...,N,heads,T,d): of rows that are heads of images, too."""
    return tensor if tensor.ndim == ndim else tensor.unflatten(-3, (recorded.batch.images, -1))


def _attend_again(recorded: Recorded, budget: RerunBudget, number: int) -> tuple[AttentionLog, Attended, Tensor]:
    """Another pass, recorded behind the last attention: what was seen, the attention, and the scores (N,K)."""
    log = AttentionLog()
    with recording_off(), log.taken(recorded.model):
        output = run_again(recorded, budget, 1)
        scores = compute_scores(recorded.scored.target, output, recorded.batch.images).values
        found = find_attended(log, number)
        if found is None:
            where = log.sightings[number].where if number < len(log.sightings) else ""
            raise cannot_follow(recorded, f"the queries and keys of the attention in '{where}' were not found")
        if not scores.requires_grad:
            raise no_gradient([log.sightings[number].where])
        return log, found, scores


def _at_queries(
    recorded: Recorded, found: Attended, log: AttentionLog, scores: Tensor
) -> Iterator[tuple[Tensor, int | None]]:
    """For a few classes at a time the gradients (k,N,heads,Q,d) at what queries got, and which query alone they are of,
    None for all of them."""
    rows = _at_one_query(recorded, found, log, scores) if scores.shape[1] > FEW else None
    if rows is not None:
        yield from rows
        return
    for (gradient,) in _jacobian(recorded, scores, [found.output]):
        if gradient is not None:
            yield _by_head(gradient, recorded, 5), None


def _at_one_query(
    recorded: Recorded, found: Attended, log: AttentionLog, scores: Tensor
) -> list[tuple[Tensor, int | None]] | None:
    """The same where the head reads one token: for many classes at a fraction of the cost. None where that is not so.

    All that is behind the attention in its block is done to each token by itself. So the block runs once more on as many
    copies of that one token as there are classes, and one backward pass gives each copy another class's gradient,
    where the gradients of all tokens, nearly all of them zero, would take a pass for each class. That it is right is
    seen: every copy has to come out as the token did.
    """
    around = find_around(found, log, recorded)
    if around is None or _is_scaled(recorded):
        return None
    running, layout = around
    axis, output = 1 - layout.image_axis, running.output
    if output is None or not output.requires_grad or not reached(scores, [output])[0]:
        return None
    parts: list[tuple[Tensor, int | None]] = []
    for (gradient,) in _jacobian(recorded, scores, [output]):
        if gradient is None:
            return None
        others = tuple(each for each in range(gradient.ndim) if each != 1 + axis)
        read = gradient.any(others).nonzero().flatten().tolist()
        if len(read) > 1:
            return None
        row = read[0] if read else 0
        at_query = _run_copies(recorded, found, running, (axis, row), gradient.select(1 + axis, row))
        if at_query is None:
            return None
        parts.append((at_query, row))
    return parts


def _run_copies(
    recorded: Recorded, found: Attended, running: Running, token: tuple[int, int], wanted: Tensor
) -> Tensor | None:
    """Gradients (k,N,heads,1,d) at what a block's attention gave one token, by axis and row, for gradients (k,N,D) at what
    the block gave it; None where the block does not do to each token the same."""
    (axis, row), plain = token, cast("Tensor", running.output)
    given = next((it for it in tensors((running.args, running.kwargs)) if it.shape == plain.shape), None)
    query = _by_head(found.output.detach(), recorded)[..., row : row + 1, :]
    expected = plain.detach().select(axis, row).unsqueeze(axis)
    counts = (len(wanted), plain.shape[axis])  # the latter for a block that takes no other number of tokens
    for count in counts:
        if given is None or count < len(wanted):
            return None
        sides = [count if each == axis else -1 for each in range(3)]
        copies = given.detach().select(axis, row).unsqueeze(axis).expand(sides)
        leaf = query.expand(-1, -1, count, -1).clone().requires_grad_()
        with torch.enable_grad():
            attended = leaf if found.output.ndim == 4 else leaf.flatten(0, 1)
        with torch.enable_grad(), AttentionPatch(lambda _: None, partial(_give, attended)):
            try:
                output = _run_block(recorded, running, given, copies.clone())
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a block raises for another number of tokens than it was given
                continue
            off = (output.detach() - expected).abs().amax() if output.shape == copies.shape else None
            if off is not None and off <= recorded.slack * expected.abs().amax():
                directions = torch.zeros_like(output)
                directions.narrow(axis, 0, len(wanted)).copy_(wanted.movedim(0, axis))
                (gradient,) = torch.autograd.grad(output, leaf, directions)
                return gradient[:, :, : len(wanted)].movedim(2, 0).unsqueeze(-2)
    return None


def _give(attended: Tensor, *_: Tensor) -> Tensor:
    return attended


def _run_block(recorded: Recorded, running: Running, given: Tensor, other: Tensor) -> Tensor:
    """What a block gives for other tokens than it was given."""
    args, kwargs = map_tensors((running.args, running.kwargs), lambda it: other if it is given else it)
    device, autocast = recorded.scored.values.device.type, recorded.autocast
    with pytorch.autocast(device, autocast):
        output: Any = first_floating(running.module(*args, **kwargs))
    return output
