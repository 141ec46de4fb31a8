"""Adapters for models that embed images as vectors, and for two-tower models, which also embed sentences."""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradcam.adapters import find_family
from gradcam.adapters.base import Embedder, ModelRun, RecordingModel
from gradcam.adapters.pooling import cheap_pooling, find_pool
from gradcam.adapters.tokenizers import load_tokenizer, tokenize
from gradcam.errors import ImageError, TargetError
from gradcam.hooks import pytorch
from gradcam.hooks.containers import Batch, list_tensors
from gradcam.hooks.preserve import preserve_state

IMAGE_TOWER, HEAD = "pictures", "head"  # keys of watched modules, in addition to `MODEL`
# Output fields that may contain the embedding. The first field with a value is used.
VECTOR_FIELDS = ("image_embeds", "image_features", "pooler_output", "last_hidden_state", "feature_maps")
# A parameter is a class token if its name ends in one of these names.
CLASS_TOKEN_NAMES = ("cls_token", "class_token", "class_embedding")
IMAGE_TOWER_OPTIONS = ("interpolate_pos_encoding",)  # arguments that the image tower takes besides the images
PASS_TOKENIZER = (
    "pass Text(..., tokenizer=function), where the function turns a list of sentences into the model's text input, or pass "
    "the sentences' embeddings as a tensor (T, D)"
)
SAVE_OR_PASS = f"save the tokenizer in the model's folder with tokenizer.save_pretrained(folder), or {PASS_TOKENIZER}"

CachedText = tuple[Any, Any, Tensor]  # the text tower's state, the tokenizer, and the sentence's embedding
_text_cache: weakref.WeakKeyDictionary[nn.Module, dict[Any, CachedText]] = weakref.WeakKeyDictionary()


def find_embedder(model: nn.Module) -> Embedder:
    """Find an embedder by the model's class, then by the model's methods. If there is none, return a `Backbone`."""
    family = find_family(model, Embedder)
    has_towers = callable(getattr(model, "get_text_features", None)) and hasattr(model, "vision_model")
    if family is not None and not (type(family) is Backbone and has_towers):
        return family
    candidates: list[tuple[type[Embedder], tuple[str, str]]] = [
        (HuggingFaceTowers, ("get_image_features", "get_text_features")),
        (CustomTowers, ("encode_image", "encode_text")),
        (TimmBackbone, ("forward_features", "get_classifier")),
    ]
    for embedder, names in candidates:
        if all(callable(getattr(model, name, None)) for name in names):
            return embedder(model)
    return Backbone(model)


class Backbone(Embedder):
    """A model that returns one vector per image: a pooled output, a class token, or the mean over all positions."""

    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        return self._extract_vectors(run.last_output())

    def _extract_vectors(self, output: Any) -> Tensor:
        names = [name for name, _ in self.model.named_parameters()]
        return to_vectors(output, has_class_token=any(name.endswith(CLASS_TOKEN_NAMES) for name in names))

    @property
    def is_transformer(self) -> bool:
        return has_uniform_attention(self.model)


class TimmBackbone(Backbone):
    """A timm model. The embedding is the input of the classifier, or the model's output if it has no classifier."""

    @property
    def takes_mean(self) -> bool:
        return getattr(self.model, "global_pool", None) == "avg"

    def watched(self) -> dict[str, nn.Module]:
        head = self.model.get_classifier()
        return super().watched() | ({HEAD: head} if isinstance(head, nn.Module) else {})

    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        calls = run.calls.get(HEAD)
        return self._extract_vectors(calls[-1].args[0] if calls and calls[-1].args else run.last_output())


def to_vectors(output: Any, *, has_class_token: bool = False) -> Tensor:
    """Return the embeddings (N,D) from the output of a model or tower. Raise `TargetError` if there are none."""
    vectors = output
    if not isinstance(output, Tensor):
        fields = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
        values = [fields[name] for name in VECTOR_FIELDS if fields.get(name) is not None]
        candidates = list_tensors(values[0] if values else output)
        # If no tensor has the shape (N,D), use the last tensor, which is the coarsest feature map.
        vectors = next((tensor for tensor in candidates if tensor.ndim == 2), candidates[-1] if candidates else None)
    if not isinstance(vectors, Tensor) or vectors.ndim not in (2, 3, 4) or not vectors.is_floating_point():
        form = f"{vectors.dtype} {tuple(vectors.shape)}" if isinstance(vectors, Tensor) else type(output).__name__
        advice = "add a pooling layer to the model, or pass a function of its output as the target."
        raise TargetError(f"The model returned {form}, expected one vector per image (N, D): {advice}")
    if vectors.ndim == 3:
        return vectors[:, 0] if has_class_token else vectors.mean(1)
    return vectors if vectors.ndim == 2 else vectors.mean((2, 3))


def has_uniform_attention(tower: nn.Module) -> bool:
    """Return whether the tower is a plain transformer, in which every block attends to the full image.

    The criteria are: all attention modules have weights of the same shapes, and the number of convolutions does not
    exceed the number of attention modules.
    """
    attentions = [module for module in _list_outer_attentions(tower) if "pool" not in type(module).__name__.lower()]
    sizes = {tuple(tuple(weight.shape) for weight in attention.parameters()) for attention in attentions}
    convolutions = sum(isinstance(module, _ConvNd) for module in tower.modules())
    return len(sizes) == 1 and convolutions <= len(attentions)


def _list_outer_attentions(module: nn.Module) -> list[nn.Module]:
    class_name = type(module).__name__.lower()
    if "block" not in class_name and any(word in class_name for word in ("attention", "attn")):
        return [module]
    return [attention for child in module.children() for attention in _list_outer_attentions(child)]


class TwoTowers(Embedder):
    """A model that embeds images and sentences in one space, by two encoders (towers) that can run separately."""

    @property
    @abstractmethod
    def tower(self) -> nn.Module:
        """Return the image tower, without the projection."""

    @property
    def projection(self) -> nn.Module:
        """Return the module that outputs the image embeddings, alone or with other values."""
        return self.tower

    @abstractmethod
    def encode_images(self, images: Tensor, **kwargs: Any) -> Tensor:
        """Return the image embeddings (N,D), attached to the graph."""

    @abstractmethod
    def encode_tokens(self, tokens: Any) -> Tensor:
        """Return the text embeddings (T,D) for the output of a tokenizer."""

    @abstractmethod
    def find_tokenizer(self) -> Any:
        """Return the model's own tokenizer. Raise `TargetError` if there is none."""

    @property
    def max_text_tokens(self) -> int | None:
        """Return the maximum length of a sentence in tokens; None if the maximum is unknown."""
        return None

    @property
    def pads_to_max_length(self) -> bool:
        """Return whether sentences are padded to the maximum length, as in training."""
        return False

    @property
    def is_transformer(self) -> bool:
        return has_uniform_attention(self.tower)

    def watched(self) -> dict[str, nn.Module]:
        return {IMAGE_TOWER: self.projection}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a wrapper that runs the image tower alone. If the towers are in a submodule, run the full model."""
        return RecordingModel(model, self.watched()) if self.prefix else RecordingModel(model, {}, self.encode_images)

    def narrow(self, batch: Batch) -> Batch:
        """Return the batch with only the image tower's inputs. Raise `ImageError` if the images differ in size."""
        if self.prefix:
            return batch
        if batch.listed is not None and len(set(batch.listed)) > 1:
            raise ImageError("The images have different sizes, but the model takes one tensor (N,C,H,W): resize them.")
        kwargs = {name: value for name, value in batch.kwargs.items() if name in IMAGE_TOWER_OPTIONS}
        return replace(batch, args=(batch.pictures,), kwargs=kwargs, listed=None)

    def read(self, run: ModelRun, batch: Batch) -> Tensor:
        return to_vectors(run.last_output(IMAGE_TOWER) if run.calls else run.output)

    def embed_texts(self, texts: Sequence[str], tokenizer: Any = None) -> Tensor:
        """Return the embeddings (T,D) of sentences, not normalised and detached from the graph.

        Embeddings are cached until the text tower changes. A change is detected if a parameter or buffer moves in
        memory, gets a new version, or has another value at its centre. If `tokenizer` is None, the model's own
        tokenizer is used. Raises `TargetError` if there is no tokenizer, or if a sentence is too long.
        """
        tokenizer = self.find_tokenizer() if tokenizer is None else tokenizer
        cache, state = _text_cache.setdefault(self.model, {}), self._fingerprint()
        # An id identifies a tokenizer only as long as the tokenizer exists. The cache therefore stores the tokenizer.
        keys = [(id(tokenizer), text) for text in texts]
        missing = [text for key, text in dict(zip(keys, texts)).items() if cache.get(key, (None,))[0] != state]
        if missing:
            tokens = tokenize(tokenizer, missing, self.max_text_tokens, fill=self.pads_to_max_length)
            device = next(self.model.parameters()).device
            with preserve_state(self.model), torch.no_grad(), pytorch.without_autocast(device.type):
                self._check_tokens(tokens)
                embeddings = self.encode_tokens(_move(tokens, device)).detach()
            for text, embedding in zip(missing, embeddings.clone()):
                cache[id(tokenizer), text] = state, tokenizer, embedding
        return torch.stack([cache[key][2] for key in keys])

    def _check_tokens(self, tokens: Any) -> None:
        """Raise `TargetError` for tokens outside the vocabulary, such as those of another model's tokenizer."""
        config = getattr(self.model, "config", None)
        owners = (getattr(config, "text_config", config), self.model, getattr(self.model, "text", None))
        sizes = [size for owner in owners if isinstance(size := getattr(owner, "vocab_size", None), int)]
        ids = _move(tokens["input_ids"] if isinstance(tokens, Mapping) else tokens, torch.device("cpu"))
        first, last = int(ids.min()), int(ids.max())
        if sizes and (first < 0 or last >= sizes[0]):
            problem = f"but {type(self.model).__name__} takes 0 to {sizes[0] - 1}"
            advice = "Pass the model's own tokenizer, Text(..., tokenizer=...)."
            raise TargetError(f"The tokenizer returns tokens {first} to {last}, {problem}. {advice}")

    def _fingerprint(self) -> Any:
        """Return a value that changes when the parameters or buffers of the text tower change."""
        modules = [] if self.tower is self.model else [self.tower, self.projection]
        image_ids = {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
        all_tensors = [*self.model.parameters(), *self.model.buffers()]
        text_tensors = [tensor.detach() for tensor in all_tensors if id(tensor) not in image_ids]
        # Group the values by dtype: some devices support no dtype to which all values could be converted.
        centres: dict[Any, list[Tensor]] = {}
        for tensor in text_tensors:
            if tensor.numel():
                centre = tensor[tuple(length // 2 for length in tensor.shape)]
                centres.setdefault((tensor.device, tensor.dtype), []).append(centre)
        values = [torch.stack(group).tolist() for group in centres.values()]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in text_tensors]
        return [(tensor.data_ptr(), tensor.dtype) for tensor in text_tensors], versions, values


class HuggingFaceTowers(TwoTowers):
    """Hugging Face's two-tower models: CLIP, SigLIP, AltCLIP, Chinese CLIP, ALIGN and models with the same interface.

    If the image tower takes patches, as in SigLIP 2's NaFlex variants, images (N,C,H,W) are cut into patches first.
    """

    @property
    def tower(self) -> nn.Module:
        return self.model.get_submodule("vision_model")

    @property
    def projection(self) -> nn.Module:
        return getattr(self.model, "visual_projection", self.tower)

    @property
    def max_text_tokens(self) -> int | None:
        for name, module in self.model.get_submodule("text_model").named_modules():
            if "position" in name and isinstance(module, nn.Embedding):
                # RoBERTa's positions start after the padding index, so the first position embeddings are unused.
                return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        return None

    @property
    def pads_to_max_length(self) -> bool:
        return type(self.model).__name__.lower().startswith("siglip")

    def encode_images(self, images: Tensor, **kwargs: Any) -> Tensor:
        if isinstance(getattr(getattr(self.tower, "embeddings", None), "patch_embedding", None), nn.Linear):
            kwargs |= cut_patches(images, self.model.config.vision_config.patch_size)
        else:
            kwargs["pixel_values"] = images
        return to_vectors(self.model.get_image_features(**kwargs))

    def encode_tokens(self, tokens: Any) -> Tensor:
        arguments = tokens if isinstance(tokens, Mapping) else {"input_ids": tokens}
        return to_vectors(self.model.get_text_features(**arguments))

    def find_tokenizer(self) -> Any:
        return load_tokenizer(str(getattr(self.model, "name_or_path", "") or ""), TargetError, SAVE_OR_PASS)


def cut_patches(images: Tensor, patch_size: int) -> dict[str, Tensor]:
    """Cut images (N,C,H,W) into square patches, row by row and channels last; return the model's arguments."""
    rows, columns = (length // patch_size for length in images.shape[2:])
    images = images[:, :, : rows * patch_size, : columns * patch_size]
    cells = images.unflatten(3, (columns, patch_size)).unflatten(2, (rows, patch_size))
    patches = cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    mask = torch.ones(patches.shape[:2], dtype=torch.int64, device=images.device)
    shapes = torch.tensor([[rows, columns]] * len(images), dtype=torch.int64, device=images.device)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def join_patches(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the images (N,C,H,W) of a NaFlex processor's output, whose patches are cut as by `cut_patches`.

    Raises `ImageError` if the images have different numbers of patches along an axis.
    """
    (rows, columns), *further = dict.fromkeys(map(tuple, inputs["spatial_shapes"].tolist()))
    if further:
        sizes = f"{rows} x {columns}, {further[0][0]} x {further[0][1]}"
        raise ImageError(f"The images have {sizes} patches: explain images of different shapes one by one.")
    patches = inputs["pixel_values"][:, : rows * columns]
    side = math.isqrt(patches.shape[2] // 3)
    cells = patches.unflatten(2, (side, side, 3)).unflatten(1, (rows, columns))
    return {"pixel_values": cells.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)}


class CustomTowers(TwoTowers):
    """Any model with `encode_image` and `encode_text`.

    If the model has a module `visual`, this module is the image tower. If the model has a `tokenizer`, the tokenizer
    converts a list of sentences to the input of `encode_text`.
    """

    pads_to_max_length = True

    @property
    def tower(self) -> nn.Module:
        visual = getattr(self.model, "visual", None)
        return visual if isinstance(visual, nn.Module) else self.model

    @property
    def takes_mean(self) -> bool:
        return getattr(self.tower, "pool_type", None) == "avg"  # an attribute of open_clip's towers

    @property
    def max_text_tokens(self) -> int | None:
        lengths = (getattr(owner, "context_length", None) for owner in (self.model, getattr(self.model, "text", None)))
        return next((length for length in lengths if isinstance(length, int)), None)

    @property
    def own_layer(self) -> str | None:
        if self.takes_mean and self.tower is not self.model:  # The model averages the tokens of this layer.
            return "visual.transformer" if getattr(self.tower, "final_ln_after_pool", False) else "visual.ln_post"
        pool: Any = find_pool(self.tower)
        is_residual = pool is not None and isinstance(getattr(self.tower, "layer4", None), nn.Module)
        # The pool's position embeddings are for the mean and for each cell. A grid has at least two cells.
        has_grid = is_residual and len(pool.positional_embedding) > 2
        return "visual.layer4" if has_grid and self.tower is not self.model else None

    def encode_images(self, images: Tensor, **kwargs: Any) -> Tensor:
        with cheap_pooling(self.tower):
            return to_vectors(self.model.encode_image(images))

    def encode_tokens(self, tokens: Any) -> Tensor:
        return to_vectors(self.model.encode_text(tokens["input_ids"] if isinstance(tokens, Mapping) else tokens))

    def find_tokenizer(self) -> Any:
        tokenizer = getattr(self.model, "tokenizer", None)
        if not callable(tokenizer):
            raise TargetError(f"This {type(self.model).__name__} has no tokenizer: {PASS_TOKENIZER}.")
        return tokenizer


class OpenClipTowers(CustomTowers):
    """open_clip's models. The tokenizer is chosen by the size of the vocabulary."""

    def find_tokenizer(self) -> Any:
        tokenizer = _make_open_clip_tokenizer(self.max_text_tokens)
        sizes = [getattr(owner, "vocab_size", None) for owner in (self.model, getattr(self.model, "text", None))]
        if tokenizer.vocab_size not in sizes:
            advice = "pass Text(..., tokenizer=open_clip.get_tokenizer(NAME)), where NAME is the model's name."
            problem = f"No tokenizer of open_clip fits the vocabulary of this {type(self.model).__name__}"
            raise TargetError(f"{problem}: {advice}")
        return tokenizer


@lru_cache(maxsize=4)
def _make_open_clip_tokenizer(max_tokens: int | None) -> Any:
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer(context_length=max_tokens)


def _move(tokens: Any, device: torch.device) -> Any:
    if isinstance(tokens, Mapping):
        return {name: torch.as_tensor(ids, dtype=torch.int64, device=device) for name, ids in tokens.items()}
    return torch.as_tensor(tokens, dtype=torch.int64, device=device)
