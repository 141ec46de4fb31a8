"""Names of weights as trainers change them, brought back to the names that the model has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gradcam.classifiers.checkpoints.heads import Tensors
from gradcam.errors import ModelError, join_names

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


@dataclass(frozen=True)
class Fitted:
    """Tensors under the model's names. `outside`: those that lay outside the prefix, parts of something else perhaps."""

    tensors: Tensors
    notes: Sequence[str] = ()
    outside: Collection[str] = ()


def fit_names(tensors: Tensors, expected: Collection[str]) -> Fitted:
    """The same tensors under the names that the model expects, as far as old spellings and one prefix tell; with notes.

    Raises `ModelError`, without the file's name, where several unusual prefixes fit alike.
    """
    tensors, notes = _without_wrappers(tensors, expected)
    tensors, more = _with_new_names(tensors, expected)
    fitted = _fit_prefix(tensors, expected)
    return replace(fitted, notes=[*notes, *more, *fitted.notes])


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
    renamed = list(tensors)
    for old, spelling in OLD_NAMES:
        if not any(old.search(name) for name in expected):
            renamed = [old.sub(spelling, name) for name in renamed]
    changed = sum(new != old for new, old in zip(renamed, tensors))
    if not changed or len(set(renamed)) < len(tensors):
        return tensors, ()
    return dict(zip(renamed, tensors.values())), [f"{changed} names of an older torchvision taken as those of today."]


def _fit_prefix(tensors: Tensors, expected: Collection[str]) -> Fitted:
    """With the one prefix off, or on, that makes most names the model's."""
    plain = sum(name in tensors for name in expected)
    too_long = _best(_prefixes(tensors, set(expected)), plain, len(expected))
    too_short = _best(_prefixes(expected, set(tensors)), plain, len(expected))
    if too_long and (not too_short or too_long[1] >= too_short[1]):
        return _take_off(tensors, too_long[0])
    if too_short:
        prefix, count = too_short
        put_before = {prefix + name if prefix + name in expected else name: tensor for name, tensor in tensors.items()}
        return Fitted(put_before, [f"'{prefix}' put before {count} names."])
    return Fitted(tensors)


def _prefixes(names: Collection[str], wanted: Collection[str]) -> Counter[str]:
    """How many names become wanted ones without a prefix, by the prefix."""
    counts: Counter[str] = Counter()
    for name in names:
        dot = name.find(".")
        while dot >= 0:
            counts[name[: dot + 1]] += name[dot + 1 :] in wanted
            dot = name.find(".", dot + 1)
    return counts


def _best(counts: Counter[str], plain: int, total: int) -> tuple[str, int] | None:
    """The prefix of most names, if they are more than without one: a usual prefix, or one of most of the model's names."""
    good = {p: count for p, count in counts.items() if count > plain and (_is_usual(p) or 2 * count > total)}
    best = [prefix for prefix in good if good[prefix] == max(good.values())]
    usual = sorted(filter(_is_usual, best), key=lambda prefix: [USUAL.index(part) for part in prefix[:-1].split(".")])
    if not usual and len(best) > 1:
        raise ModelError(f"holds weights for several models that fit alike, {join_names(best)}: keep one of them.")
    return ((usual or best)[0], max(good.values())) if best else None


def _is_usual(prefix: str) -> bool:
    return all(part in USUAL for part in prefix[:-1].split("."))


def _take_off(tensors: Tensors, prefix: str) -> Fitted:
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    outside = {name: t for name, t in tensors.items() if not name.startswith(prefix) and name not in inside}
    return Fitted({**inside, **outside}, [f"'{prefix}' taken off {len(inside)} names."], list(outside))
