"""Rename a checkpoint's tensors to a model's names, report differences, and load the tensors."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradcam.errors import ModelError, join_names
from gradcam.models.checkpoints.read import Checkpoint

Tensors = dict[str, Tensor]

MAX_LISTED_NAMES = 3
FACTORY_HINT = "Write a function that builds the model as it was trained, and give --model FILE.py:FUNCTION."
LAZY_HINT = "Run the model once in the function that builds it."
LARGER_FILE = "The file contains this model and more: an additional head, or a larger model that includes this model."
COUNTER = "num_batches_tracked"  # a step counter of batch norms, used only in training
# Buffers that modules compute themselves. In files from other library versions, such a buffer may be missing or have
# another size. The last two names are counters that the package thop adds.
COMPUTED_BUFFERS = (
    COUNTER, "relative_position_index", "relative_coords_table", "attn_mask", "position_ids", "total_ops", "total_params",
)  # fmt: skip
TRAINING_ONLY = re.compile(r"(AuxLogits|aux1|aux2|aux_classifier)\.")  # heads of Inception, GoogLeNet and segmenters
# Common prefixes, in order of preference. As in `find_state_dicts`, prefixes of averaged weights come first.
KNOWN_PREFIXES = ("ema_model", "model_ema", "ema", "module", "model", "net", "backbone", "network", "_forward_module")
# Parts that module wrappers insert into names, at any depth.
WRAPPER_PARTS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Old names in torchvision, and their replacements: for DenseNet until 0.2, for vision transformers until 0.12.
OLD_NAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\."), r"\1\2."),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)


def count_classes(checkpoint: Checkpoint, model: nn.Module) -> int | None:
    """Return the number of classes in a checkpoint of this architecture; None if it is unknown."""
    expected, name = _expect(model), f"{find_head(model)}.weight"
    weight = _fit(checkpoint, model, expected).tensors.get(name) if name in expected else None
    return len(weight) if weight is not None and weight.shape[1:] == expected[name].shape[1:] else None


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> Sequence[str]:
    """Load a checkpoint into a model, in the model's precision; return notes on renamed and ignored tensors.

    A model on the meta device gets new storage. If a tensor is missing, unexpected, of the wrong shape or not finite,
    nothing is loaded, and `ModelError` is raised. Differences in buffers that modules compute themselves, and in
    heads used only in training, are ignored.
    """
    expected = _expect(model)
    fitted = _fit(checkpoint, model, expected)
    difference = compare(fitted.tensors, expected, fitted.outside)
    if difference.missing or difference.unexpected or difference.shapes:
        summary, details = difference.describe(model)
        raise ModelError(f"{checkpoint.path}: {summary}", details)
    fitting = [name for name in expected if name in fitted.tensors and name not in difference.negligible]
    for name in fitting:
        tensor, value = fitted.tensors[name], expected[name]
        # For example, quantised weights are integers, which cannot replace floating-point weights.
        if tensor.is_complex() or tensor.is_floating_point() != value.is_floating_point():
            raise ModelError(f"{checkpoint.path}: '{name}' is {tensor.dtype}, expected {value.dtype}.")
    # Make contiguous copies, because newly created weights are contiguous too.
    options: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}
    state = OrderedDict((name, fitted.tensors[name].to(expected[name].dtype, **options)) for name in fitting)
    _check_finite(checkpoint, state)
    # If the file lacks a counter, set the counter to zero. `compare` has reported all other missing meta tensors.
    counters = {name: value for name, value in expected.items() if value.is_meta and name not in state}
    state.update((name, torch.zeros_like(value, device="cpu")) for name, value in counters.items())
    # Copy the module versions from the model. Otherwise, modules would take the weights for the oldest version.
    state._metadata = expected._metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(state, strict=False, assign=any(tensor.is_meta for tensor in expected.values()))
    except RuntimeError as error:
        raise ModelError(f"{checkpoint.path}: {' '.join(str(error).split())}") from error
    return [*checkpoint.notes, *fitted.notes, *difference.notes()]


def _expect(model: nn.Module) -> Tensors:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"The model's '{name}' is uninitialised (lazy). {LAZY_HINT}")
    expected = model.state_dict()
    for name in [name for name, value in expected.items() if not isinstance(value, Tensor)]:  # extra state of modules
        del expected[name]
    return expected


def _fit(checkpoint: Checkpoint, model: nn.Module, expected: Tensors) -> Fitted:
    if checkpoint.tensors.keys() == expected.keys():
        return Fitted(checkpoint.tensors)
    try:
        fitted = fit_names(checkpoint.tensors, expected)
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from None
    tensors, notes = rename_head(fitted.tensors, expected, find_head(model))
    return replace(fitted, tensors=tensors, notes=[*fitted.notes, *notes])


def _check_finite(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Raise `ModelError` if a weight is NaN or infinite, because the network would return only NaN."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    sums = [tensor.sum(dtype=torch.float32) for tensor in floating.values()]
    if sums and torch.stack(sums).isfinite().all():  # A quick test. If a sum overflows, check all values.
        return
    if non_finite := [name for name, tensor in floating.items() if not tensor.isfinite().all()]:
        problem = f"{len(non_finite)} tensors contain NaN or infinity, the first is '{non_finite[0]}'"
        cause = "The training diverged, or the values overflow the model's precision."
        raise ModelError(f"{checkpoint.path}: {problem}. {cause} Use an earlier checkpoint.")


@dataclass(frozen=True)
class Fitted:
    """Tensors under the model's names.

    `outside` lists the tensors without the model's prefix, which may belong to another module, such as a teacher.
    """

    tensors: Tensors
    notes: Sequence[str] = ()
    outside: Collection[str] = ()


def fit_names(tensors: Tensors, expected: Collection[str]) -> Fitted:
    """Rename tensors to the model's names: remove wrapper parts, replace old names, and remove or add one prefix.

    If several prefixes are possible, the prefix with the most matching names is used. If several unknown prefixes match
    equally well, `ModelError` is raised; the message does not name the file.
    """
    notes = []
    for part in WRAPPER_PARTS:
        wrapped = sum(part in name for name in tensors)
        unwrapped = {name.replace(part, ""): tensor for name, tensor in tensors.items()}
        if wrapped and len(unwrapped) == len(tensors) and not any(part in name for name in expected):
            tensors = unwrapped
            notes.append(f"'{part}' removed from {wrapped} tensor names.")
    renamed = list(tensors)
    for pattern, replacement in OLD_NAMES:
        if not any(pattern.search(name) for name in expected):
            renamed = [pattern.sub(replacement, name) for name in renamed]
    changed = sum(new != name for new, name in zip(renamed, tensors))
    if changed and len(set(renamed)) == len(tensors):
        tensors = dict(zip(renamed, tensors.values()))
        notes.append(f"{changed} tensors renamed: the file uses the names of an older torchvision version.")
    unprefixed = sum(name in tensors for name in expected)
    removable = _best(_prefixes(tensors, set(expected)), unprefixed, len(expected))
    addable = _best(_prefixes(expected, set(tensors)), unprefixed, len(expected))
    if removable and (not addable or removable[1] >= addable[1]):
        prefix = removable[0]
        inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        outside = {name: t for name, t in tensors.items() if not name.startswith(prefix) and name not in inside}
        return Fitted(
            inside | outside, [*notes, f"Prefix '{prefix}' removed from {len(inside)} tensor names."], list(outside)
        )
    if addable:
        prefix, count = addable
        tensors = {prefix + name if prefix + name in expected else name: tensor for name, tensor in tensors.items()}
        notes.append(f"Prefix '{prefix}' added to {count} tensor names.")
    return Fitted(tensors, notes)


def _prefixes(names: Collection[str], targets: Collection[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name in names:
        for dot in re.finditer(r"\.", name):
            counts[name[: dot.end()]] += name[dot.end() :] in targets
    return counts


def _best(counts: Counter[str], unprefixed: int, total: int) -> tuple[str, int] | None:
    """Return the prefix with the most matches, and the number of matches; None if no prefix is suitable.

    A suitable prefix meets two conditions. More names match with the prefix than without it. Also, all parts of the
    prefix are in `KNOWN_PREFIXES`, or more than half of the model's names match.
    """
    candidates = {p: count for p, count in counts.items() if count > unprefixed and (_is_usual(p) or 2 * count > total)}
    best = [prefix for prefix in candidates if candidates[prefix] == max(candidates.values())]
    ranks = {prefix: list(map(KNOWN_PREFIXES.index, prefix[:-1].split("."))) for prefix in best if _is_usual(prefix)}
    preferred = sorted(ranks, key=ranks.__getitem__)
    if not preferred and len(best) > 1:
        raise ModelError(f"contains several models that fit equally well, {join_names(best)}: save only one of them.")
    return ((preferred or best)[0], max(candidates.values())) if best else None


def _is_usual(prefix: str) -> bool:
    return all(part in KNOWN_PREFIXES for part in prefix[:-1].split("."))


def find_head(model: nn.Module) -> str | None:
    """Return the name of the last module with parameters; None unless it is a linear layer or a 1x1 convolution."""
    owners = [(name, module) for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    name, last = owners[-1] if owners else ("", None)
    weight = getattr(last, "weight", None)
    is_head = isinstance(weight, Tensor) and weight.ndim >= 2 and all(side == 1 for side in weight.shape[2:])
    return name if is_head else None


def rename_head(tensors: Tensors, expected: Mapping[str, Tensor], head: str | None) -> tuple[Tensors, Sequence[str]]:
    """Rename a checkpoint's head to the model's head if the match is certain; return all tensors, and notes.

    For example, CheXNet's classifier is a `Sequential` of a linear layer and a sigmoid, so its weight is called
    `classifier.0.weight` instead of `classifier.weight`. The match is certain if exactly one module under the
    head's top-level name has unmatched tensors, if one of the two modules contains the other, and if both have the same
    parameter names. The caller checks the shapes.
    """
    head_suffixes = {name.removeprefix(head) for name in expected if name.startswith(f"{head}.")} if head else set()
    if not head or any(f"{head}{name}" in tensors for name in head_suffixes):
        return tensors, ()
    remaining = [name for name in tensors if name not in expected]
    owners = {name.rpartition(".")[0] for name in remaining if name.startswith(f"{head.partition('.')[0]}.")}
    owner = owners.pop() if len(owners) == 1 else ""
    is_near = owner.startswith(f"{head}.") or head.startswith(f"{owner}.")
    if not is_near or {name.removeprefix(owner) for name in remaining if name.startswith(f"{owner}.")} != head_suffixes:
        return tensors, ()
    inside = [name for name in tensors if name.startswith(f"{owner}.")]
    renamed = {name: f"{head}{name.removeprefix(owner)}" for name in inside}
    remark = "The file does not say whether training applied a sigmoid after this layer."
    notes = [f"The tensors of '{owner}' were loaded into the last layer, '{head}'. {remark}"]
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}, notes


@dataclass(frozen=True)
class Difference:
    """The differences between a checkpoint and a model, by tensor name.

    `shapes` maps a name to two shapes: in the file, and in the model. Differences in `negligible` are ignored.
    """

    missing: Sequence[str]
    unexpected: Sequence[str]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    negligible: Sequence[str]
    matching: int
    total: int

    def notes(self) -> Sequence[str]:
        """Return a note on ignored tensors other than counters; an empty sequence if there are none."""
        names = [name for name in self.negligible if name.rpartition(".")[2] != COUNTER]
        if not names:
            return ()
        return [f"{len(names)} tensor(s) that the model does not need were ignored, such as '{names[0]}'."]

    def describe(self, model: nn.Module) -> tuple[str, str]:
        """Return a one-line summary, and details: three lists of tensors with their lengths, and the likely cause."""
        shapes = [f"'{name}' has {actual}, expected {required}" for name, (actual, required) in self.shapes.items()]
        counted = [("wrong shape", len(shapes), "; ".join(shapes[:MAX_LISTED_NAMES]))]
        for title, names in (("unexpected", self.unexpected), ("missing", self.missing)):
            more = ", ..." if len(names) > MAX_LISTED_NAMES else ""
            counted.insert(0, (title, len(names), join_names(names[:MAX_LISTED_NAMES]) + more))
        lists = ", ".join(f"{title}: {count}{f' ({first})' if first else ''}" for title, count, first in counted)
        fitting = f"{self.matching} of the model's {self.total} tensors match."
        return f"does not fit {type(model).__name__}: {fitting}", f"{lists}. {self._cause(model)}"

    def _cause(self, model: nn.Module) -> str:
        head = find_head(model)
        wrong = [*self.missing, *self.unexpected, *self.shapes]
        in_head = head is not None and all(name.startswith(f"{head}.") for name in [*self.missing, *self.shapes])
        if self.matching < len(wrong):
            return "The weights belong to a different architecture than this model."
        if in_head and self.shapes and not self.missing and not self.unexpected:
            classes = next(iter(self.shapes.values()))
            return f"The numbers of classes differ: {classes[0][0]} in the file, {classes[1][0]} in the model."
        if in_head and self.missing and not self.shapes:
            return f"The last layer, '{head}', is missing or different in the file. {FACTORY_HINT}"
        if not self.missing and not self.shapes:
            return LARGER_FILE
        return f"The file belongs to another size or version of this architecture. {FACTORY_HINT}"


def compare(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], outside: Collection[str] = ()) -> Difference:
    """Return the differences between a checkpoint's renamed tensors and a model's state dict.

    If nothing is missing, unexpected tensors in `outside` are negligible, because they belong to another module, such
    as a loss or a teacher.
    """
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    different = [name for name, value in expected.items() if name in tensors and tensors[name].shape != value.shape]
    shapes = {name: (tuple(tensors[name].shape), tuple(expected[name].shape)) for name in different}
    # If a buffer is missing, the model's value is used. Meta tensors have no value, but a counter can start at 0.
    replaceable = {name for name, value in expected.items() if not value.is_meta or name.rpartition(".")[2] == COUNTER}
    negligible = [name for name in [*missing, *shapes] if name in replaceable and _is_computed(name)]
    for name in unexpected:
        head = TRAINING_ONLY.match(name)
        is_unused = head is not None and not any(expected_name.startswith(head[0]) for expected_name in expected)
        negligible += [name] if is_unused or _is_computed(name) else []
    if set(missing) <= set(negligible) and set(shapes) <= set(negligible):
        negligible += [name for name in unexpected if name in outside and name not in negligible]
    matching = len(expected) - len(missing) - len(shapes)
    missing, unexpected = ([name for name in names if name not in negligible] for names in (missing, unexpected))
    shapes = {name: pair for name, pair in shapes.items() if name not in negligible}
    return Difference(missing, unexpected, shapes, negligible, matching, len(expected))


def _is_computed(name: str) -> bool:
    return name.rpartition(".")[2] in COMPUTED_BUFFERS
