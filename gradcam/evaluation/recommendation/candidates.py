"""The layers of a model that are worth trying: a handful of all that there are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.forward import find_layers_with_grid
from gradcam.cam.listing import LayerRow, list_layers
from gradcam.errors import LayerError
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import first_floating, to_batch
from gradcam.hooks.preserve import undisturbed
from gradcam.layers.find import find_layer, unwrap

LAST = 4  # layers of the coarsest grid, counted from the end
BLOCKS = 3  # of a model with one grid all along, such as a transformer, the last ones


def find_candidates(model: nn.Module, image: Tensor, default: str) -> list[str]:
    """Layers at which a map can be taken and may be better than at `default`, which comes first; seven or fewer.

    Read off passes of `image` (1,C,H,W), in the order in which the layers end. These are
    - of the coarsest grid the last four that all goes through, such as a ReLU, the norm and the convolution before it, and
      the last block: the model's own parts and those of `nn.Sequential` ones, no branches, and none in the first quarter;
    - of the next finer grid the least nested one, the last of these: the block before, and no part of a block;
    - where there is one grid all along, as in a transformer: the same layer as `default` in the two blocks before.
    Of a block and its last part, which gives the same, it is the block.

    Raises `LayerError` for an unknown default, and where there is no layer with a grid.
    """
    model = unwrap(model)
    default = find_layer(model, default).name
    with_grid = set(find_layers_with_grid(model, to_batch(image)))
    listed = [row for row in list_layers(model, image) if row.cam and not row.is_out_of_place]
    rows = {row.name: row for row in listed if row.grid and row.name in with_grid}
    ended = _list_ended(model, image)
    straight = [name for name in ended[len(ended) // 4 :] if name in rows and _is_straight(model, name)]
    coarse, *fine = sorted({_count_places(row) for row in rows.values()}) or [0]
    found = [default, *[name for name in reversed(straight) if _count_places(rows[name]) == coarse][:LAST]]
    if fine:
        finer = [name for name in reversed(ended) if name in rows and _count_places(rows[name]) == fine[0]]
        found += sorted(finer, key=lambda name: name.count("."))[:1]
    else:
        found += _find_alike(default, rows)
    return list(dict.fromkeys(found))


def check_layers(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The layers' full names, each once. Raises `LayerError` for an unknown one, and where there are none."""
    if isinstance(names, str) or not names:
        raise LayerError(f"layers is {names!r}, expected a list of at least one layer, by name.")
    return list(dict.fromkeys(find_layer(unwrap(model), name).name for name in names))


def _count_places(row: LayerRow) -> int:
    return math.prod(row.grid or ())


def _is_straight(model: nn.Module, name: str) -> bool:
    """Whether it is a part of the model itself, or of parts that run one after another."""
    parts = name.split(".")[:-1]
    return all(
        isinstance(model.get_submodule(".".join(parts[:end])), nn.Sequential) for end in range(1, len(parts) + 1)
    )


def _list_ended(model: nn.Module, image: Tensor) -> list[str]:
    """The layers in the order in which they end; the last part of a block gives way to the block that returns its output."""
    names = {module: name for name, module in model.named_modules() if name}
    ended: list[str] = []
    last: Tensor | None = None

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal last
        tensor = first_floating(output)
        if ended and tensor is last and ended[-1].startswith(f"{names[module]}."):
            ended.pop()
        ended.append(names[module])
        last = tensor

    with undisturbed(model), torch.no_grad(), Hooks() as hooks:
        for module in names:
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, note)
        model(image)
    return ended


def _find_alike(name: str, rows: Mapping[str, LayerRow]) -> list[str]:
    """The layers of the blocks before: names that differ in the first number alone, which is the block's."""
    number = re.search(r"\d+(?=\.|$)", name)
    if number is None:
        return []
    blocks = range(int(number[0]) - 1, int(number[0]) - BLOCKS, -1)
    alike = [f"{name[: number.start()]}{block}{name[number.end() :]}" for block in blocks]
    return [one for one in alike if one in rows]
