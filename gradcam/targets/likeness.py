"""The target for image similarity: the cosine of two images' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcam.adapters.base import Embedder
from gradcam.adapters.embedding import TwoTowers, find_embedder
from gradcam.errors import TargetError, shorten
from gradcam.hooks.containers import Batch, at_least_float32, detach_input, to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.options import keep_old_names
from gradcam.targets.base import BoundTarget, Instance, ScoreExtractor, Target, TargetScores

# The default methods. If an image tower's embedding is the mean of its tokens, the score is a sum with one term per
# token, and Grad-CAM is suitable. Towers that pool tokens by attention need Grad-ECLIP.
MEAN_POOLING_METHOD, ATTENTION_METHOD = "gradcam", "grad-eclip"
MAX_EMBEDDING_ULPS = 64  # The tolerance for two embeddings of one image, in units in the last place.


@keep_old_names
@dataclass(frozen=True, eq=False)
class Like(Target):
    """A reference image: explain what makes the images similar to this reference.

    The score is the cosine similarity of the two embeddings. The reference's embedding is a constant. If the reference
    is an image, `explanation.reference` contains maps on the reference image, one for each explained image.

    Parameters
    ----------
    reference : Tensor (C,H,W), (R,C,H,W), (D,) or (R,D), or an image
        The reference image, preprocessed like the explained images, or its embedding. Each reference gives one map.
        With `gradcam.load_matcher`, the reference may be anything that `gradcam.read_image` takes, or a list of such
        images.
    name : str or sequence of str, default "reference"
        The name of the reference, or a list of names for several references.

    Raises
    ------
    TargetError
        If the tensor is invalid. When used with a model: if the reference is not a tensor, the model does not return
        one vector per image, or an embedding has another length than the model's embeddings.

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
        if not isinstance(self.reference, Tensor):
            return
        shape = tuple(self.reference.shape)
        if not self.reference.is_floating_point() or len(shape) not in (1, 2, 3, 4) or not self.reference.numel():
            raise TargetError(
                f"The reference is {self.reference.dtype} {shape}, expected a floating-point image (C,H,W), or an "
                "embedding (D,)."
            )

    @property
    def images(self) -> Tensor | None:
        """Return the reference images (R,C,H,W); None if the reference is an embedding."""
        reference: Any = self.reference
        if not isinstance(reference, Tensor):
            raise TargetError(
                f"The reference is {shorten(reference)}, expected a tensor: an image (C,H,W), preprocessed like the "
                "explained images, or an embedding (D,). gradcam.explain reads no files: use gradcam.load_matcher for "
                "image files."
            )
        return None if reference.ndim < 3 else reference if reference.ndim == 4 else reference[None]

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        family, references = find_embedder(model), self.images
        vectors = self.reference.reshape(-1, self.reference.shape[-1])
        if references is not None:
            if references.ndim != batch.pictures.ndim:
                raise TargetError(
                    f"The reference is an image {tuple(references.shape[1:])}, but the images are "
                    f"{tuple(batch.pictures.shape)}: pass the embedding (D,) of the reference instead."
                )
            vectors = embed(family, model, to_batch(references.to(batch.device)))
        names = self.name
        if isinstance(names, str):
            names = [names] if len(vectors) == 1 else [f"{names} {i}" for i in range(len(vectors))]
        if len(names) != len(vectors):
            problem = f"There are {len(vectors)} references, but {len(names)} names"
            raise TargetError(f"{problem}: pass one name per reference.")
        instances = [Instance("like", name) for name in names]
        extractor = CosineScoreExtractor(family, batch, *to_directions(vectors), instances)

        def mirror(scored: TargetScores) -> tuple[Any, Any]:
            # The target of an augmented batch (`RepeatedTarget`) stores no embeddings.
            embedded = getattr(scored.target, "embedded", None)
            return references, Like(embed(family, model, batch) if embedded is None else embedded, "picture")

        bound = bind_cosines(model, batch, extractor)
        return bound if references is None else replace(bound, mirror=mirror)


def embed(family: Embedder, model: nn.Module, batch: Batch) -> Tensor:
    """Return the embeddings (N,D) of images, detached from the graph."""
    batch = narrow(family, batch)
    with preserve_state(model), torch.no_grad():
        return family.read(batch.copy(detach_input).run(family.wrap(model)), batch).detach()


def narrow(family: Embedder, batch: Batch) -> Batch:
    """Return the batch without the inputs of a text tower, which image embeddings do not need."""
    return family.narrow(batch) if isinstance(family, TwoTowers) else batch


def bind_cosines(model: nn.Module, batch: Batch, extractor: CosineScoreExtractor) -> BoundTarget:
    """Bind cosine scores to a model, with the default layer and method for the model's image tower."""
    family = extractor.family
    method = ATTENTION_METHOD if family.is_transformer and not family.takes_mean else MEAN_POOLING_METHOD
    module, images = family.wrap(model), narrow(family, batch)
    return BoundTarget(module, images, extractor, family.layer, method, own_output=lambda run: run.output)


def to_directions(vectors: Tensor, against: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the directions (K,D) and the unit vectors (K,D) of `vectors`.

    A direction is the unit vector minus the mean unit vector of `against`. Without `against`, both results are equal.
    The results are at least float32, detached from the graph, and not inference tensors. Raises `TargetError` for a
    zero vector, infinities and NaN.
    """
    with torch.inference_mode(False), torch.no_grad():
        units = _to_units(vectors)
        return (units if against is None else units - _to_units(against).mean(0)), units


def _to_units(vectors: Tensor) -> Tensor:
    vectors = detach_input(vectors)
    vectors = at_least_float32(vectors)
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    if not bool((lengths.isfinite() & (lengths > 0)).all()):
        raise TargetError("An embedding is zero, infinite or NaN, so it has no cosine similarity.")
    return vectors / lengths[:, None]


def _is_parallel(vectors: Tensor, directions: Tensor) -> Tensor:
    """Return a mask (N,K) that is True where direction k is parallel to the unit vector of image n.

    The cosine is then at its maximum or minimum. Its true gradient is zero, and the computed gradient is rounding
    error.
    """
    vectors = vectors.detach()
    perpendicular = directions - (vectors @ directions.T)[..., None] * vectors[:, None]
    tolerances = MAX_EMBEDDING_ULPS * torch.finfo(vectors.dtype).eps * torch.linalg.vector_norm(directions, dim=1)
    return torch.linalg.vector_norm(perpendicular, dim=2) <= tolerances


@dataclass(frozen=True, eq=False)
class CosineScoreExtractor(ScoreExtractor):
    """Extracts cosine scores: the dot products of the normalised embeddings (N,D) and the `directions` (K,D).

    The cosines with `units` (K,D) are reported in the instances. `embedded` are the embeddings of the scored images;
    None before `score` computes them.
    """

    family: Embedder
    batch: Batch
    directions: Tensor
    units: Tensor
    instances: Sequence[Instance]
    embedded: Tensor | None = None

    def score(self, output: Any, images: int) -> TargetScores:
        vectors = self.family.read(output, self.batch)
        if len(vectors) != images or vectors.shape[1] != self.directions.shape[1]:
            raise TargetError(
                f"The model returned {tuple(vectors.shape)} for {images} image(s), expected "
                f"({images}, {self.directions.shape[1]}): embeddings of the same length as the target embedding."
            )
        normalised = F.normalize(at_least_float32(vectors), dim=1)
        directions = self.directions.to(normalised)
        values, is_constant = normalised @ directions.T, _is_parallel(normalised, directions)
        instances = [
            [replace(instance, score=cosine) for instance, cosine in zip(self.instances, cosines)]
            for cosines in (normalised.detach() @ self.units.to(normalised).T).tolist()
        ]
        target = replace(self, embedded=vectors.detach())
        return TargetScores(values, None, None, target, instances, settled=is_constant)
