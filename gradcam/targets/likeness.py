"""What makes a picture like another one: the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.errors import TargetError, shorten
from gradcam.families.base import Embedder
from gradcam.families.embedding import TwoTowers, find_embedder
from gradcam.hooks.nested import Batch, caller_keeps, to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.options import keep_old_names
from gradcam.targets.base import Bound, Instance, Reader, Scored, Target

# The methods, by what the tower of pictures ends with. Behind a mean each place, or token, has its own share.
OF_MEAN, OF_ATTENTION = "gradcam", "grad-eclip"
ROUNDING = 64  # units in the last place, by which embeddings of one picture may differ


@keep_old_names
@dataclass(frozen=True, eq=False)
class Like(Target):
    """A reference image: explain what makes the images similar to it.

    The score is the cosine similarity of the two embeddings. The reference's embedding is a constant. If the reference
    is an image, the explanation's `reference` has the maps on that image, one for each explained image.

    Parameters
    ----------
    reference : Tensor (C,H,W), (R,C,H,W), (D,) or (R,D), or an image
        The reference image, preprocessed like the images, or its embedding. Several references give one map each. With
        `gradcam.load_matcher`, the reference may be anything that `gradcam.read_image` takes, or a list of such images.
    name : str or sequence of str, default "reference"
        The name of the reference, or a list of names for several references.

    Raises
    ------
    TargetError
        If the tensor is invalid. When used with a model: if the reference is not a tensor, the model does not return
        one vector per image, or the length of an embedding differs from the model's.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> from gradcam.targets import Like
    >>> model = torchvision.models.resnet18(weights=None).eval()
    >>> model.fc = torch.nn.Identity()
    >>> images, other = torch.rand(2, 3, 64, 64), torch.rand(3, 64, 64)
    >>> explanation = gradcam.explain(model, images, target=Like(other))
    >>> explanation.heatmaps.shape, explanation.reference.heatmaps.shape
    (torch.Size([2, 1, 64, 64]), torch.Size([1, 2, 64, 64]))
    """

    reference: Any
    name: str | Sequence[str] = "reference"

    def __post_init__(self) -> None:
        given = self.reference
        is_tensor = isinstance(given, Tensor)
        if is_tensor and (not given.is_floating_point() or given.ndim not in (1, 2, 3, 4) or not given.numel()):
            raise TargetError(
                f"The reference is {given.dtype} {tuple(given.shape)}, expected a floating-point image (C,H,W), or an "
                "embedding (D,)."
            )

    @property
    def images(self) -> Tensor | None:
        """The reference images (R,C,H,W); None if an embedding was given."""
        given: Any = self.reference
        if not isinstance(given, Tensor):
            raise TargetError(
                f"The reference is {shorten(given)}, expected a tensor: an image (C,H,W), preprocessed like the explained "
                "images, or an embedding (D,). gradcam.explain reads no files: use gradcam.load_matcher for image files."
            )
        return None if given.ndim < 3 else given if given.ndim == 4 else given[None]

    def bind(self, model: nn.Module, batch: Batch) -> Bound:
        family, others = find_embedder(model), self.images
        vectors = self.reference.reshape(-1, self.reference.shape[-1])
        if others is not None and others.ndim != batch.pictures.ndim:
            raise TargetError(
                f"The reference is an image {tuple(others.shape[1:])}, but the images are {tuple(batch.pictures.shape)}: "
                "pass the embedding (D,) of the reference instead."
            )
        if others is not None:
            vectors = embed(family, model, to_batch(others.to(batch.device)))
        names = self.name
        if isinstance(names, str):
            names = [names] if len(vectors) == 1 else [f"{names} {i}" for i in range(len(vectors))]
        if len(names) != len(vectors):
            raise TargetError(
                f"There are {len(vectors)} references, but {len(names)} names: pass one name per reference."
            )
        reader = CosineReader(family, batch, *to_directions(vectors), [Instance("like", name) for name in names])

        def mirror(scored: Scored) -> tuple[Any, Any]:
            embedded = getattr(scored.target, "embedded", None)  # not of other views of the pictures beside them
            return others, Like(embed(family, model, batch) if embedded is None else embedded, "picture")

        bound = bind_reader(model, batch, reader)
        return bound if others is None else replace(bound, mirror=mirror)


def embed(family: Embedder, model: nn.Module, batch: Batch) -> Tensor:
    """The vectors (N,D) of pictures, without a graph."""
    batch = narrow(family, batch)
    with preserve_state(model), torch.no_grad():
        return family.read(batch.copy(caller_keeps).run(family.wrap(model)), batch).detach()


def narrow(family: Embedder, batch: Batch) -> Batch:
    """What is left of a batch for a model of which the tower of pictures alone is run."""
    return family.narrow(batch) if isinstance(family, TwoTowers) else batch


def bind_reader(model: nn.Module, batch: Batch, reader: CosineReader) -> Bound:
    """The cosines that a reader reads, for this model."""
    family = reader.family
    method = OF_ATTENTION if family.is_transformer and not family.takes_mean else OF_MEAN
    shown = narrow(family, batch)
    return Bound(family.wrap(model), shown, reader, family.layer, method, own_output=lambda seen: seen.output)


def to_directions(vectors: Tensor, against: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of length 1 (K,D), less the mean of those `against` them, and without that; at least in float32, without a
    graph, and outside of inference mode. Raises `TargetError` for a vector of zeros, or of numbers that are none."""
    with torch.inference_mode(False), torch.no_grad():
        units = _to_units(vectors)
        return (units if against is None else units - _to_units(against).mean(0)), units


def _to_units(vectors: Tensor) -> Tensor:
    vectors = caller_keeps(vectors)
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    if not bool((lengths.isfinite() & (lengths > 0)).all()):
        raise TargetError("An embedding is zero, infinite or NaN, so it has no cosine similarity.")
    return vectors / lengths[:, None]


def _find_settled(vectors: Tensor, directions: Tensor) -> Tensor:
    """Where unit vectors (N,D) have the same direction as those of rows (K,D), so that what there is of a gradient is
    rounding: (N,K)."""
    vectors = vectors.detach()
    across = directions - (vectors @ directions.T)[..., None] * vectors[:, None]
    most = ROUNDING * torch.finfo(vectors.dtype).eps * torch.linalg.vector_norm(directions, dim=1)
    return torch.linalg.vector_norm(across, dim=2) <= most


@dataclass(frozen=True, eq=False)
class CosineReader(Reader):
    """What a model's normalised vectors (N,D) give with `directions` (K,D). `units`: of which the cosines are told.
    `embedded`: the vectors of the pictures that were scored, once they are."""

    family: Embedder
    batch: Batch
    directions: Tensor
    units: Tensor
    instances: Sequence[Instance]
    embedded: Tensor | None = None

    def score(self, output: Any, images: int) -> Scored:
        vectors = self.family.read(output, self.batch)
        if len(vectors) != images or vectors.shape[1] != self.directions.shape[1]:
            raise TargetError(
                f"The model returned {tuple(vectors.shape)} for {images} image(s), expected "
                f"({images}, {self.directions.shape[1]}), the length of the embedding to compare with."
            )
        normalised = F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=1)
        directions = self.directions.to(normalised)
        values, settled = normalised @ directions.T, _find_settled(normalised, directions)
        cosines = (normalised.detach() @ self.units.to(normalised).T).tolist()
        instances = [[replace(each, score=cosine) for each, cosine in zip(self.instances, row)] for row in cosines]
        return Scored(values, None, None, replace(self, embedded=vectors.detach()), instances, settled=settled)
