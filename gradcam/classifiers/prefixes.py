"""Names of weights as trainers change them, brought back to the names that the model has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from torch import Tensor

from gradcam.errors import ModelError, join_names

KNOWN = ("module", "model", "net", "network", "backbone", "encoder", "_orig_mod", "_forward_module", "ema", "ema_model")
# What wrappers of modules put into names, at any depth.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Names that torchvision gave once, each with what it gives now: DenseNet until 0.2, vision transformers until 0.12.
OLD_NAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\."), r"\1\2."),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)
Tensors = dict[str, Tensor]


def fit_names(tensors: Tensors, expected: Collection[str]) -> tuple[Tensors, Sequence[str]]:
    """The same tensors under the names that the model expects, as far as one prefix and old spellings tell; with notes."""
    tensors, notes = _without_wrappers(tensors, expected)
    tensors, more = _with_new_names(tensors, expected)
    tensors, last = _fit_prefix(tensors, expected)
    return tensors, [*notes, *more, *last]


def _without_wrappers(tensors: Tensors, expected: Collection[str]) -> tuple[Tensors, Sequence[str]]:
    notes = []
    for part in WRAPPERS:
        touched = sum(part in name for name in tensors)
        plain = {name.replace(part, ""): tensor for name, tensor in tensors.items()}
        if touched and len(plain) == len(tensors) and not any(part in name for name in expected):
            tensors = plain
            notes.append(f"'{part}' taken out of {touched} names.")
    return tensors, notes


def _with_new_names(tensors: Tensors, expected: Collection[str]) -> tuple[Tensors, Sequence[str]]:
    renamed = {}
    for name, tensor in tensors.items():
        new = name
        for old, spelling in OLD_NAMES:
            new = old.sub(spelling, new)
        renamed[new] = tensor
    ends = {name.rpartition(".denselayer")[2].rpartition(".mlp")[2] for name in expected}
    changed = [new for old, new in zip(tensors, renamed) if old != new]
    fits = all(new.rpartition(".denselayer")[2].rpartition(".mlp")[2] in ends for new in changed)
    if not changed or len(renamed) < len(tensors) or not fits:
        return tensors, ()
    return renamed, [f"{len(changed)} names of an older torchvision taken as those of today."]


def _fit_prefix(tensors: Tensors, expected: Collection[str]) -> tuple[Tensors, Sequence[str]]:
    """With the one prefix off, or on, that makes most names the model's."""
    plain = sum(name in tensors for name in expected)
    too_long = _best(_prefixes(tensors, set(expected)), plain, len(expected))
    too_short = _best(_prefixes(expected, set(tensors)), plain, len(expected))
    if too_long is not None and (too_short is None or too_long[1] >= too_short[1]):
        return _take_off(tensors, *too_long)
    if too_short is not None:
        prefix, count = too_short
        return {prefix + name: tensor for name, tensor in tensors.items()}, [f"'{prefix}' put before {count} names."]
    return tensors, ()


def _prefixes(names: Collection[str], wanted: set[str]) -> Counter[str]:
    """How many names become wanted ones without a prefix, by the prefix."""
    counts: Counter[str] = Counter()
    for name in names:
        dot = name.find(".")
        while dot >= 0:
            if name[dot + 1 :] in wanted:
                counts[name[: dot + 1]] += 1
            dot = name.find(".", dot + 1)
    return counts


def _best(counts: Counter[str], plain: int, total: int) -> tuple[str, int] | None:
    """The prefix of most names, if they are more than without one: a usual prefix, or one of most of the model's names."""
    good = {
        prefix: count
        for prefix, count in counts.items()
        if count > plain and (2 * count > total or set(prefix[:-1].split(".")) <= set(KNOWN))
    }
    most = max(good.values(), default=0)
    best = [prefix for prefix, count in good.items() if count == most]
    usual = [prefix for prefix in best if set(prefix[:-1].split(".")) <= set(KNOWN)]
    if len(usual or best) > 1:
        raise ModelError(f"holds several models' weights that fit alike, those of {join_names(best)}: keep one of them")
    return ((usual or best)[0], most) if best else None


def _take_off(tensors: Tensors, prefix: str, count: int) -> tuple[Tensors, Sequence[str]]:
    """What lies under the prefix: the rest belongs to other parts than the model, such as a loss or a teacher."""
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    outside = [name for name in tensors if not name.startswith(prefix)]
    notes = [f"'{prefix}' taken off {len(inside)} names."]
    if outside:
        notes.append(f"{len(outside)} tensors outside '{prefix}' were left out, the first '{outside[0]}'.")
    return inside, notes
