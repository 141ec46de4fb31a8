from collections import namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gradcam.hooks.containers import find_floating_tensor, list_tensors, map_tensors, replace_tensor

Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Output:
    index: Tensor
    inside: dict[str, object]
    text: str = "kept"


def value() -> Output:
    return Output(torch.tensor([1]), {"pair": Pair(torch.tensor([2.0]), [torch.tensor([3.0]), None]), "n": 4})


def test_a_mapping_that_cannot_be_changed_becomes_a_dict() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    replaced = replace_tensor(MappingProxyType({"a": old, "b": 3}), old, new)
    assert replaced == {"a": new, "b": 3}


def test_tensors_in_order() -> None:
    assert [tensor.item() for tensor in list_tensors(value())] == [1, 2, 3]
    first = find_floating_tensor(value())
    assert first.item() == 2
    assert find_floating_tensor({"n": torch.tensor([1])}) is None


def test_map_keeps_kinds_and_leaves_the_original_alone() -> None:
    before = value()
    after = map_tensors(before, lambda tensor: tensor * 10)
    assert [tensor.item() for tensor in list_tensors(after)] == [10, 20, 30]
    assert [tensor.item() for tensor in list_tensors(before)] == [1, 2, 3]
    assert type(after) is Output
    assert type(after.inside["pair"]) is Pair
    assert after.text == "kept"
    assert after.inside["n"] == 4


def test_replace() -> None:
    before = value()
    old, new = before.inside["pair"].a, torch.tensor([7.0])  # type: ignore[attr-defined]
    after = replace_tensor(before, old, new)
    assert after.inside["pair"].a is new
    assert after.index is before.index
