"""A checkpoint's tensors under the names that a model expects, what is wrong with them, and how they are loaded."""

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

MOST_NAMES = 3
BUILD = "Write a function that builds the model as it was trained, and give --model FILE.py:FUNCTION."
COUNTER = "num_batches_tracked"  # of batch norms, for training alone
# Buffers that modules work out by themselves, and that their versions keep, drop or size differently; thop's counts.
COMPUTED = (
    COUNTER, "relative_position_index", "relative_coords_table", "attn_mask", "position_ids", "total_ops", "total_params",
)  # fmt: skip
TRAINING_ONLY = re.compile(r"(AuxLogits|aux1|aux2|aux_classifier)\.")  # heads of Inception, GoogLeNet and segmenters
# Usual first parts of names, the preferred ones first: averages, as `find_state_dicts` has it.
USUAL = ("ema_model", "model_ema", "ema", "module", "model", "net", "backbone", "network", "_forward_module")
# What wrappers of modules put into names, at any depth.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Names that torchvision gave once, each with what it gives now: DenseNet until 0.2, vision transformers until 0.12.
OLD_NAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\."), r"\1\2."),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)


def count_classes(checkpoint: Checkpoint, model: nn.Module) -> int | None:
    """How many classes the checkpoint has, for a model of this architecture with any number; None where that is unknown."""
    expected, name = _expect(model), f"{find_head(model)}.weight"
    found = _fit(checkpoint, model, expected).tensors.get(name) if name in expected else None
    return len(found) if found is not None and found.shape[1:] == expected[name].shape[1:] else None


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> Sequence[str]:
    """Loads the checkpoint into the model, in the model's own precision; gives sentences on what was made to fit. A
    model on the meta device gets storage of its own. Nothing is loaded unless all that the model needs is there, and
    nothing else, but for buffers that are worked out anyway and heads that only training needs: otherwise raises
    `ModelError` with what is missing, unexpected and of wrong shape; and for weights that are not finite."""
    expected = _expect(model)
    fitted = _fit(checkpoint, model, expected)
    difference = compare(fitted.tensors, expected, fitted.outside)
    if difference.missing or difference.unexpected or difference.shapes:
        what, details = difference.describe(model)
        raise ModelError(f"{checkpoint.path}: {what}", details)
    fitting = [name for name in expected if name in fitted.tensors and name not in difference.of_no_account]
    for name in fitting:
        tensor, wanted = fitted.tensors[name], expected[name]
        if tensor.is_complex() or tensor.is_floating_point() != wanted.is_floating_point():  # such as quantised weights
            raise ModelError(f"{checkpoint.path}: '{name}' is {tensor.dtype}, expected {wanted.dtype}.")
    plain: dict[str, Any] = {"copy": True, "memory_format": torch.contiguous_format}  # as the model's own would lie
    state = OrderedDict((name, fitted.tensors[name].to(expected[name].dtype, **plain)) for name in fitting)
    _check_finite(checkpoint, state)
    # compare() allows nothing but counters to be missing where the model has no values of its own.
    counters = {name: wanted for name, wanted in expected.items() if wanted.is_meta and name not in state}
    state.update((name, torch.zeros_like(wanted, device="cpu")) for name, wanted in counters.items())
    # The names and shapes are today's: without a version, modules would take them for those of their oldest one.
    state._metadata = expected._metadata  # type: ignore[attr-defined]  # PyTorch keeps versions there
    try:
        model.load_state_dict(state, strict=False, assign=any(tensor.is_meta for tensor in expected.values()))
    except RuntimeError as error:
        raise ModelError(f"{checkpoint.path}: {' '.join(str(error).split())}") from error
    return [*checkpoint.notes, *fitted.notes, *difference.notes()]


def _expect(model: nn.Module) -> Tensors:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"The model's '{name}' is uninitialised (lazy). Run the model once in its factory function."
            )
    expected = model.state_dict()
    for name in [name for name, value in expected.items() if not isinstance(value, Tensor)]:  # modules' extra state
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
    """A network with one weight that is not a number answers nothing else: said here, where the file is known."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    sums = [tensor.sum(dtype=torch.float32) for tensor in floating.values()]
    if sums and torch.stack(sums).isfinite().all():  # quick, and right where no sum overflows
        return
    if wrong := [name for name, tensor in floating.items() if not tensor.isfinite().all()]:
        raise ModelError(
            f"{checkpoint.path}: {len(wrong)} tensors contain NaN or infinity, the first is '{wrong[0]}'. "
            "The training diverged, or the values overflow the model's precision. Use an earlier checkpoint."
        )


@dataclass(frozen=True)
class Fitted:
    """Tensors under the model's names. `outside`: those that lay outside the prefix, parts of something else perhaps."""

    tensors: Tensors
    notes: Sequence[str] = ()
    outside: Collection[str] = ()


def fit_names(tensors: Tensors, expected: Collection[str]) -> Fitted:
    """The same tensors under the names that the model expects, as far as old spellings and one prefix tell; with notes.
    The prefix makes most names the model's. Raises `ModelError`, without the file's name, where several fit alike."""
    notes = []
    for part in WRAPPERS:
        touched = sum(part in name for name in tensors)
        unwrapped = {name.replace(part, ""): tensor for name, tensor in tensors.items()}
        if touched and len(unwrapped) == len(tensors) and not any(part in name for name in expected):
            tensors = unwrapped
            notes.append(f"'{part}' removed from {touched} names.")
    renamed = list(tensors)
    for old, spelling in OLD_NAMES:
        if not any(old.search(name) for name in expected):
            renamed = [old.sub(spelling, name) for name in renamed]
    changed = sum(new != old for new, old in zip(renamed, tensors))
    if changed and len(set(renamed)) == len(tensors):
        tensors = dict(zip(renamed, tensors.values()))
        notes.append(f"{changed} tensors renamed: the file uses the names of an older torchvision version.")
    plain = sum(name in tensors for name in expected)
    too_long = _best(_prefixes(tensors, set(expected)), plain, len(expected))
    too_short = _best(_prefixes(expected, set(tensors)), plain, len(expected))
    if too_long and (not too_short or too_long[1] >= too_short[1]):
        prefix = too_long[0]
        inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        outside = {name: t for name, t in tensors.items() if not name.startswith(prefix) and name not in inside}
        return Fitted(inside | outside, [*notes, f"Prefix '{prefix}' removed from {len(inside)} names."], list(outside))
    if too_short:
        prefix, count = too_short
        tensors = {prefix + name if prefix + name in expected else name: tensor for name, tensor in tensors.items()}
        notes.append(f"Prefix '{prefix}' added to {count} names.")
    return Fitted(tensors, notes)


def _prefixes(names: Collection[str], wanted: Collection[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name in names:
        for dot in re.finditer(r"\.", name):
            counts[name[: dot.end()]] += name[dot.end() :] in wanted
    return counts


def _best(counts: Counter[str], plain: int, total: int) -> tuple[str, int] | None:
    """The prefix of most names, if they are more than without one: a usual prefix, or one of most of the model's names."""
    good = {p: count for p, count in counts.items() if count > plain and (_is_usual(p) or 2 * count > total)}
    best = [prefix for prefix in good if good[prefix] == max(good.values())]
    usual = sorted(filter(_is_usual, best), key=lambda prefix: [USUAL.index(part) for part in prefix[:-1].split(".")])
    if not usual and len(best) > 1:
        raise ModelError(f"contains several models that fit equally well, {join_names(best)}: save only one of them.")
    return ((usual or best)[0], max(good.values())) if best else None


def _is_usual(prefix: str) -> bool:
    return all(part in USUAL for part in prefix[:-1].split("."))


def find_head(model: nn.Module) -> str | None:
    """The name of the last module with parameters, if it has a weight (classes, features) or (classes, features, 1, 1)."""
    owners = [(name, it) for name, it in model.named_modules() if next(it.parameters(recurse=False), None) is not None]
    name, last = owners[-1] if owners else ("", None)
    weight = getattr(last, "weight", None)
    is_head = isinstance(weight, Tensor) and weight.ndim >= 2 and all(side == 1 for side in weight.shape[2:])
    return name if is_head else None


def rename_head(tensors: Tensors, expected: Mapping[str, Tensor], head: str | None) -> tuple[Tensors, Sequence[str]]:
    """The tensors with the head under the model's name, where it is certain which they are; with notes. A `Sequential`
    around the last layer puts a number into its name: `classifier.0.weight` for `classifier.weight`, as CheXNet's
    linear layer and sigmoid. It is followed if it has the very parameters that the head would have, and nothing else
    lies there; their shapes are for others to check."""
    own = {name.removeprefix(head) for name in expected if name.startswith(f"{head}.")} if head else set()
    if not head or any(f"{head}{name}" in tensors for name in own):
        return tensors, ()
    left = [name for name in tensors if name not in expected]
    owners = {name.rpartition(".")[0] for name in left if name.startswith(f"{head.partition('.')[0]}.")}
    owner = owners.pop() if len(owners) == 1 else ""
    is_near = owner.startswith(f"{head}.") or head.startswith(f"{owner}.")
    if not is_near or {name.removeprefix(owner) for name in left if name.startswith(f"{owner}.")} != own:
        return tensors, ()
    inside = [name for name in tensors if name.startswith(f"{owner}.")]
    renamed = {name: f"{head}{name.removeprefix(owner)}" for name in inside}
    note = (
        f"The tensors of '{owner}' were loaded into the last layer, '{head}'. The file does not say whether training "
        "applied a sigmoid after this layer."
    )
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}, [note]


@dataclass(frozen=True)
class Difference:
    """What is wrong, by name, `shapes` with what the file has and what the model expects; and what is of no account."""

    missing: Sequence[str]
    unexpected: Sequence[str]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    of_no_account: Sequence[str]
    matching: int
    total: int

    def notes(self) -> Sequence[str]:
        """A sentence on what was passed over; counters are not worth one."""
        names = [name for name in self.of_no_account if name.rpartition(".")[2] != COUNTER]
        return (
            [f"{len(names)} tensor(s) that the model does not need were ignored, such as '{names[0]}'."]
            if names
            else ()
        )

    def describe(self, model: nn.Module) -> tuple[str, str]:
        """A line that says so, and one of three counted lists and the likely cause."""
        shapes = [f"'{name}' has {has}, expected {wants}" for name, (has, wants) in self.shapes.items()]
        counted = [
            (name, len(names), join_names(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else ""))
            for name, names in (("missing", self.missing), ("unexpected", self.unexpected))
        ]
        counted.append(("wrong shape", len(shapes), "; ".join(shapes[:MOST_NAMES])))
        lists = ", ".join(f"{what}: {count}{f' ({first})' if first else ''}" for what, count, first in counted)
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
            return f"The last layer, '{head}', is missing or different in the file. {BUILD}"
        if not self.missing and not self.shapes:
            return (
                "The file contains this model and more: an additional head, or a larger model that includes this model."
            )
        return f"The file belongs to another size or version of this architecture. {BUILD}"


def compare(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], outside: Collection[str] = ()) -> Difference:
    """The difference between a checkpoint's tensors, under the model's names, and the model's state dict.

    `outside`: names that need not be the model's, if it has everything: parts of something else, as a loss or a teacher.
    """
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    other = [name for name, wanted in expected.items() if name in tensors and tensors[name].shape != wanted.shape]
    shapes = {name: (tuple(tensors[name].shape), tuple(expected[name].shape)) for name in other}
    # The model's own value will do: one on the meta device has none, yet counters start at zero.
    kept = {name for name, wanted in expected.items() if not wanted.is_meta or name.rpartition(".")[2] == COUNTER}
    idle = [name for name in [*missing, *shapes] if name in kept and name.rpartition(".")[2] in COMPUTED]
    for name in unexpected:
        head = TRAINING_ONLY.match(name)
        has_none = head is not None and not any(other.startswith(head[0]) for other in expected)
        idle += [name] if has_none or name.rpartition(".")[2] in COMPUTED else []
    if set(missing) <= set(idle) and set(shapes) <= set(idle):
        idle += [name for name in unexpected if name in outside and name not in idle]
    matching = len(expected) - len(missing) - len(shapes)
    missing, unexpected = ([name for name in names if name not in idle] for names in (missing, unexpected))
    shapes = {name: pair for name, pair in shapes.items() if name not in idle}
    return Difference(missing, unexpected, shapes, idle, matching, len(expected))
