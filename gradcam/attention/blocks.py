"""The blocks of a transformer whose attention can be followed: one after another, over the same tokens of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradcam.arguments import Batch
from gradcam.attention.census import Census, Sighting
from gradcam.axes import Axes
from gradcam.errors import ModelError
from gradcam.patches import find_patches
from gradcam.recording import Recorded
from gradcam.tokens import Layout, find_layout


@dataclass(frozen=True)
class Blocks:
    """By name, in the order in which they ran; `shape`: of the last one's output, in which `layout` is the picture."""

    modules: dict[str, nn.Module]
    layout: Layout
    shape: tuple[int, ...]

    @property
    def last(self) -> tuple[str, nn.Module]:
        """The last one's name, and itself."""
        return list(self.modules.items())[-1]

    @property
    def token_axis(self) -> int:
        """The axis of the tokens in a block's output."""
        return 1 - self.layout.image_axis

    @property
    def tokens(self) -> int:
        """How many there are, with those before the picture's."""
        return self.shape[self.token_axis]

    def to_grid(self, values: Tensor) -> Tensor:
        """Values of tokens (...,T) at their places in the picture (...,h,w), without those of other tokens."""
        return values[..., self.layout.prefix :].unflatten(-1, self.layout.grid)


def find_blocks(census: Census, recorded: Recorded) -> Blocks:
    """The blocks of the model that was recorded, each of which is the outermost module around one attention only.

    What comes behind the last of them, such as a pooling by attention, is the head's matter. Raises `ModelError` where a
    block's attention is not between all tokens of the picture, the same in all blocks, or where there is none.
    """
    attentions = _all_over_the_picture(census, recorded)
    owners = [_owner(attentions, index, census, recorded) for index in range(len(attentions))]
    shape = census.outputs[owners[-1]]
    modules = {name: recorded.model.get_submodule(name) for name in owners}
    layout = _find_layout(shape, recorded, modules[owners[-1]])
    if layout is None:  # not so: `_owner` has found one
        raise _cannot_follow(recorded, "its tokens form no grid")
    return Blocks(modules, layout, shape)


def is_over_picture(shape: Sequence[int], recorded: Recorded) -> bool:
    """Whether an attention (N,...,T,T), or (N*heads,T,T), is between tokens of each picture, and they form a grid."""
    rows, queries, keys, images = shape[0], shape[-2], shape[-1], recorded.batch.images
    are_images = rows == images if len(shape) == 4 else rows % images == 0 and len(shape) == 3
    return are_images and queries == keys and _find_layout((images, keys, 1), recorded) is not None


def _find_layout(shape: Sequence[int], recorded: Recorded, module: nn.Module | None = None) -> Layout | None:
    batch, patches = recorded.batch, find_patches(recorded.modules)
    if module is not None:
        return Axes(recorded.model, batch, patches).find_layout(shape, module)
    return find_layout(shape, batch.size, module, batch.images, patches=patches)


def _all_over_the_picture(census: Census, recorded: Recorded) -> list[Sighting]:
    """All attentions up to the last one over the whole picture."""
    sightings = census.sightings
    if not sightings:
        raise _cannot_follow(
            recorded,
            "none was seen: it has none, or a kernel of its own, such as flash_attn's (for Hugging Face's take "
            "attn_implementation='eager')",
        )
    fitting = [index for index, each in enumerate(sightings) if is_over_picture(each.shape, recorded)]
    found = sightings[: fitting[-1] + 1] if fitting else sightings
    for index, sighting in enumerate(found):
        if index not in fitting:
            raise _cannot_follow(recorded, _misfit(sighting, recorded.batch))
    counts = list(dict.fromkeys(sighting.keys for sighting in found))
    if len(counts) > 1:
        raise _cannot_follow(recorded, f"it has {' and then '.join(map(str, counts))} tokens, not the same throughout")
    return found


def _misfit(sighting: Sighting, batch: Batch) -> str:
    shape = f"one of them, in '{sighting.running[-1] if sighting.running else ''}', is {sighting.shape}"
    if sighting.queries != sighting.keys:
        return f"{shape}: its queries and keys are not the same tokens (attention across, or over pooled keys)"
    if sighting.shape[0] != batch.images or len(sighting.shape) > 4:
        return f"{shape} for {batch.images} image(s): it stays inside windows, or another part of each image"
    size = " x ".join(map(str, batch.size))
    return f"{shape}, and {sighting.keys} tokens form no grid on images of {size} (it may be channels that attend)"


def _owner(attentions: Sequence[Sighting], index: int, census: Census, recorded: Recorded) -> str:
    """The outermost module that ran around this attention and no other, and gave tokens."""
    tokens = attentions[index].keys
    others = {name for number, other in enumerate(attentions) if number != index for name in other.running}
    for name in attentions[index].running:
        shape = census.outputs.get(name, ())
        if name in others or len(shape) != 3:
            continue
        layout = _find_layout(shape, recorded, recorded.model.get_submodule(name))
        if layout is not None and shape[1 - layout.image_axis] == tokens:
            return name
    where = attentions[index].running[-1] if attentions[index].running else ""
    raise _cannot_follow(
        recorded,
        f"no module around '{where}' has this attention alone and gives its {tokens} tokens, as a block does",
    )


def _cannot_follow(recorded: Recorded, why: str) -> ModelError:
    return ModelError(
        f"The attention of {type(recorded.model).__name__} cannot be followed back to the picture: {why}. "
        "Choose a method that looks at a layer, such as 'gradcam'."
    )
