"""Models that give a vector for each picture, and those that give one for a sentence as well."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradcam.errors import ImageError, TargetError
from gradcam.families import find_family
from gradcam.families.base import Embedder, Seen, Watched
from gradcam.families.pooling import cheap_pooling, find_pool
from gradcam.families.tokens import load_tokenizer, tokenize
from gradcam.hooks import pytorch
from gradcam.hooks.nested import Batch, tensors
from gradcam.hooks.preserve import preserve_state

PICTURES, HEAD = "pictures", "head"  # what is watched, besides the model
VECTORS = (
    "image_embeds",
    "image_features",
    "pooler_output",
    "last_hidden_state",
    "feature_maps",
)  # the first one is taken
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")  # as the names of parameters end
OF_PICTURES = ("interpolate_pos_encoding",)  # arguments beside the pictures that a tower of pictures takes
TOKENIZER = (
    "pass Text(..., tokenizer=function), where the function turns a list of sentences into the model's text input, or pass "
    "the sentences' embeddings as a tensor (T, D)"
)
SAVE_OR_PASS = f"save the tokenizer in the model's folder with tokenizer.save_pretrained(folder), or {TOKENIZER}"

Known = tuple[Any, Any, Tensor]  # the state of the tower, the tokenizer, and the embedding that is of both
_embedded: weakref.WeakKeyDictionary[nn.Module, dict[Any, Known]] = weakref.WeakKeyDictionary()
_tokenizers: weakref.WeakKeyDictionary[nn.Module, tuple[str, Any]] = weakref.WeakKeyDictionary()


def find_embedder(model: nn.Module) -> Embedder:
    """What reads a model's vectors: of a known family, by the methods that the model has, or any module whose output is
    (N,D)."""
    known = find_family(model, Embedder)
    has_towers = callable(getattr(model, "get_text_features", None)) and hasattr(model, "vision_model")
    if known is not None and not (type(known) is Backbone and has_towers):
        return known
    kinds: list[tuple[type[Embedder], tuple[str, str]]] = [
        (HuggingFaceTowers, ("get_image_features", "get_text_features")),
        (OwnTowers, ("encode_image", "encode_text")),
        (TimmBackbone, ("forward_features", "get_classifier")),
    ]
    return next((kind for kind, names in kinds if all(callable(getattr(model, it, None)) for it in names)), Backbone)(
        model
    )


class Backbone(Embedder):
    """Any model whose output has a vector for each picture: itself, as a pooled output, or as tokens and maps, of which
    the class token is taken, or else the mean over all places."""

    def read(self, seen: Seen, batch: Batch) -> Tensor:
        return self._take(seen.last())

    def _take(self, output: Any) -> Tensor:
        names = [name for name, _ in self.model.named_parameters()]
        return to_vectors(output, has_class_token=any(name.endswith(CLASS_TOKENS) for name in names))

    @property
    def is_transformer(self) -> bool:
        return is_plain_transformer(self.model)


class TimmBackbone(Backbone):
    """A model of timm's, with a classifier or without: the vector that the classifier is given."""

    @property
    def takes_mean(self) -> bool:
        return getattr(self.model, "global_pool", None) == "avg"

    def watched(self) -> dict[str, nn.Module]:
        head = self.model.get_classifier()  # type: ignore[operator]  # a method of all of timm's models
        return super().watched() | ({HEAD: head} if isinstance(head, nn.Module) else {})

    def read(self, seen: Seen, batch: Batch) -> Tensor:
        calls = seen.calls.get(HEAD)
        return self._take(calls[-1].args[0] if calls and calls[-1].args else seen.last())


def to_vectors(output: Any, *, has_class_token: bool = False) -> Tensor:
    """The vectors (N,D) in what a model, or a tower of it, gives. Raises `TargetError` where there are none."""
    found = output
    if not isinstance(output, Tensor):
        named = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
        held = tensors(next((named[name] for name in VECTORS if named.get(name) is not None), output))
        found = next((it for it in held if it.ndim == 2), held[-1] if held else None)  # of several maps the coarsest
    if not isinstance(found, Tensor) or found.ndim not in (2, 3, 4) or not found.is_floating_point():
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
        raise TargetError(
            f"The model returned {what}, expected one vector per image (N, D): add a pooling layer to the model, or pass "
            "a function of its output as the target."
        )
    if found.ndim == 3:
        return found[:, 0] if has_class_token else found.mean(1)
    return found if found.ndim == 2 else found.mean((2, 3))


def is_plain_transformer(tower: nn.Module) -> bool:
    """Whether all its blocks attend alike, over all of the picture: attentions of one size, and hardly a convolution."""
    attentions = [each for each in _outermost_attentions(tower) if "pool" not in type(each).__name__.lower()]
    sizes = {tuple(tuple(it.shape) for it in each.parameters()) for each in attentions}
    convolutions = sum(isinstance(module, _ConvNd) for module in tower.modules())
    return len(sizes) == 1 and convolutions <= len(attentions)


def _outermost_attentions(module: nn.Module) -> list[nn.Module]:
    title = type(module).__name__.lower()
    if "block" not in title and any(word in title for word in ("attention", "attn")):
        return [module]
    return [found for child in module.children() for found in _outermost_attentions(child)]


class Tower(nn.Module):
    """A model of which the tower of pictures alone is run; its output is `Seen` with the vectors (N,D). The model is its
    `module`, so that layers keep their names."""

    def __init__(self, model: nn.Module, encode: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self._encode = model, encode

    def forward(self, *args: Any, **kwargs: Any) -> Seen:
        return Seen(self._encode(*args, **kwargs))


class TwoTowers(Embedder):
    """Pictures and sentences in one space, each with a tower of its own, of which one is run without the other."""

    @property
    @abstractmethod
    def tower(self) -> nn.Module:
        """The tower of pictures, up to what is pooled."""

    @property
    def projection(self) -> nn.Module:
        """The module of the model whose output is, or holds, the pictures' embeddings."""
        return self.tower

    @abstractmethod
    def encode_pictures(self, pictures: Tensor, **kwargs: Any) -> Tensor:
        """Embeddings (N,D) with their graph."""

    @abstractmethod
    def encode_tokens(self, tokens: Any) -> Tensor:
        """Embeddings (T,D) of what a tokenizer gave."""

    @abstractmethod
    def find_tokenizer(self) -> Any:
        """The model's own. Raises `TargetError` where there is none."""

    @property
    def most_tokens(self) -> int | None:
        """How many tokens the tower of sentences takes, None where that is not known."""
        return None

    @property
    def pads_all(self) -> bool:
        """Whether every sentence is filled up to as many tokens as the tower takes, as in training."""
        return False

    @property
    def is_transformer(self) -> bool:
        return is_plain_transformer(self.tower)

    def watched(self) -> dict[str, nn.Module]:
        return {PICTURES: self.projection}

    def wrap(self, model: nn.Module) -> nn.Module:
        """The tower of pictures alone; a model around this one runs as a whole."""
        return Watched(model, self.watched()) if self.prefix else Tower(model, self.encode_pictures)

    def narrow(self, batch: Batch) -> Batch:
        """What the tower of pictures takes of a batch. Raises `ImageError` for pictures of several sizes."""
        if self.prefix:
            return batch
        if batch.listed is not None and len(set(batch.listed)) > 1:
            raise ImageError("The images have different sizes, but the model takes one tensor (N,C,H,W): resize them.")
        kwargs = {name: value for name, value in batch.kwargs.items() if name in OF_PICTURES}
        return replace(batch, args=(batch.pictures,), kwargs=kwargs, listed=None)

    def read(self, seen: Seen, batch: Batch) -> Tensor:
        return to_vectors(seen.last(PICTURES) if seen.calls else seen.output)

    def embed_texts(self, texts: Sequence[str], tokenizer: Any = None) -> Tensor:
        """The sentences' embeddings (T,D), not normalised and without a graph. Each is computed once, and again when the
        tower of sentences has changed: when a parameter of it has another place in memory, was written to, or has another
        value in its middle. `tokenizer`: in place of the model's own. Raises `TargetError` where there is none, and for a
        sentence that is too long, with the words at which it would be cut."""
        tokenizer = self.find_tokenizer() if tokenizer is None else tokenizer
        known, state = _embedded.setdefault(self.model, {}), self._find_state()
        keys = [(id(tokenizer), text) for text in texts]  # which is of no other one, as long as it is kept here
        missing = [text for key, text in dict(zip(keys, texts)).items() if known.get(key, (None,))[0] != state]
        if missing:
            tokens = tokenize(tokenizer, missing, self.most_tokens, fill=self.pads_all)
            device = next(self.model.parameters()).device
            with preserve_state(self.model), torch.no_grad(), pytorch.without_autocast(device.type):
                self._check_tokens(tokens)
                found = self.encode_tokens(_move(tokens, device)).detach()
            known.update({(id(tokenizer), text): (state, tokenizer, row) for text, row in zip(missing, found.clone())})
        return torch.stack([known[key][2] for key in keys])

    def _check_tokens(self, tokens: Any) -> None:
        """Raise `TargetError` for tokens outside of the vocabulary, such as those of another model's tokenizer."""
        config = getattr(self.model, "config", None)
        holders = (getattr(config, "text_config", config), self.model, getattr(self.model, "text", None))
        sizes = [size for holder in holders if isinstance(size := getattr(holder, "vocab_size", None), int)]
        ids = _move(tokens["input_ids"] if isinstance(tokens, Mapping) else tokens, torch.device("cpu"))
        if sizes and (int(ids.min()) < 0 or int(ids.max()) >= sizes[0]):
            raise TargetError(
                f"The tokenizer returns tokens {int(ids.min())} to {int(ids.max())}, but {type(self.model).__name__} takes "
                f"0 to {sizes[0] - 1}. Pass the model's own tokenizer, Text(..., tokenizer=...)."
            )

    def _find_state(self) -> Any:
        own = {id(it) for module in (self.tower, self.projection) for it in (*module.parameters(), *module.buffers())}
        all_of_them = [*self.model.parameters(), *self.model.buffers()]
        others = [it.detach() for it in all_of_them if id(it) not in own or self.tower is self.model]
        middles: dict[Any, list[Tensor]] = {}  # By type, since not every device has one that holds all of them.
        for it in others:
            if it.numel():
                middles.setdefault((it.device, it.dtype), []).append(it[tuple(length // 2 for length in it.shape)])
        values = [torch.stack(group).tolist() for group in middles.values()]
        versions = [0 if it.is_inference() else it._version for it in others]
        return [(it.data_ptr(), it.dtype) for it in others], versions, values


class HuggingFaceTowers(TwoTowers):
    """Hugging Face's two-tower models: CLIP, SigLIP, AltCLIP, Chinese CLIP, ALIGN and others of their interface. Where a
    tower takes patches, as SigLIP 2's for any aspect does, pictures (N,C,H,W) are cut into those here."""

    @property
    def tower(self) -> nn.Module:
        return self.model.get_submodule("vision_model")

    @property
    def projection(self) -> nn.Module:
        return getattr(self.model, "visual_projection", self.tower)

    @property
    def most_tokens(self) -> int | None:
        for name, module in self.model.get_submodule("text_model").named_modules():
            if "position" in name and isinstance(module, nn.Embedding):
                # RoBERTa's positions are counted from the padding index on.
                return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        return None

    @property
    def pads_all(self) -> bool:
        return type(self.model).__name__.lower().startswith("siglip")

    def encode_pictures(self, pictures: Tensor, **kwargs: Any) -> Tensor:
        embedding, model = (
            getattr(getattr(self.tower, "embeddings", None), "patch_embedding", None),
            cast("Any", self.model),
        )
        if isinstance(embedding, nn.Linear):
            kwargs |= cut(pictures, model.config.vision_config.patch_size)
        else:
            kwargs["pixel_values"] = pictures
        return to_vectors(model.get_image_features(**kwargs))

    def encode_tokens(self, tokens: Any) -> Tensor:
        given = tokens if isinstance(tokens, Mapping) else {"input_ids": tokens}
        return to_vectors(self.model.get_text_features(**given))  # type: ignore[operator]

    def find_tokenizer(self) -> Any:
        name = str(getattr(self.model, "name_or_path", "") or "")
        known = _tokenizers.get(self.model)
        if known is None or known[0] != name:
            known = _tokenizers[self.model] = name, load_tokenizer(name, TargetError, SAVE_OR_PASS)
        return known[1]


def cut(pictures: Tensor, side: int) -> dict[str, Tensor]:
    """Pictures (N,C,H,W) as rows of square patches, each with its channels last, and what says how they lay."""
    grid = [length // side for length in pictures.shape[2:]]
    cells = pictures[:, :, : grid[0] * side, : grid[1] * side].unflatten(3, (-1, side)).unflatten(2, (-1, side))
    patches = cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    device = pictures.device
    shapes = torch.tensor([grid] * len(pictures), dtype=torch.int64, device=device)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int64, device=device),
        "spatial_shapes": shapes,
    }


class OwnTowers(TwoTowers):
    """Any model with `encode_image` and `encode_text`; its `visual` is the tower of pictures, and its `tokenizer` a function
    from a list of sentences to what `encode_text` takes, if it has these."""

    @property
    def tower(self) -> nn.Module:
        visual = getattr(self.model, "visual", None)
        return visual if isinstance(visual, nn.Module) else self.model

    @property
    def takes_mean(self) -> bool:
        return getattr(self.tower, "pool_type", None) == "avg"  # as open_clip calls it

    @property
    def most_tokens(self) -> int | None:
        found = getattr(self.model, "context_length", None)
        found = getattr(getattr(self.model, "text", None), "context_length", None) if found is None else found
        return found if isinstance(found, int) else None

    @property
    def pads_all(self) -> bool:
        return True

    @property
    def own_layer(self) -> str | None:
        if self.takes_mean and self.tower is not self.model:  # the last tokens, of which the mean is taken
            return "visual.transformer" if getattr(self.tower, "final_ln_after_pool", False) else "visual.ln_post"
        pool = find_pool(self.tower)
        is_residual = pool is not None and isinstance(getattr(self.tower, "layer4", None), nn.Module)
        has_grid = is_residual and len(cast("Any", pool).positional_embedding) > 2  # the mean and a cell, or several
        return "visual.layer4" if has_grid and self.tower is not self.model else None

    def encode_pictures(self, pictures: Tensor, **kwargs: Any) -> Tensor:
        with cheap_pooling(self.tower):
            return to_vectors(self.model.encode_image(pictures))  # type: ignore[operator]

    def encode_tokens(self, tokens: Any) -> Tensor:
        return to_vectors(self.model.encode_text(tokens["input_ids"] if isinstance(tokens, Mapping) else tokens))  # type: ignore[operator]

    def find_tokenizer(self) -> Any:
        own = getattr(self.model, "tokenizer", None)
        if not callable(own):
            raise TargetError(f"This {type(self.model).__name__} has no tokenizer: {TOKENIZER}.")
        return own


class OpenClipTowers(OwnTowers):
    """open_clip's models, with the tokenizer that their vocabulary is of."""

    def find_tokenizer(self) -> Any:
        from open_clip.tokenizer import SimpleTokenizer

        length = self.most_tokens
        known = _tokenizers.get(self.model)
        if known is None:
            known = _tokenizers[self.model] = "", SimpleTokenizer(context_length=length)
        sizes = [getattr(it, "vocab_size", None) for it in (self.model, getattr(self.model, "text", None))]
        if known[1].vocab_size not in sizes:
            raise TargetError(
                f"This {type(self.model).__name__} has an unknown vocabulary: pass Text(..., "
                "tokenizer=open_clip.get_tokenizer(NAME)), with the model's name."
            )
        return known[1]


def _move(tokens: Any, device: torch.device) -> Any:
    if isinstance(tokens, Mapping):
        return {name: torch.as_tensor(it, dtype=torch.int64, device=device) for name, it in tokens.items()}
    return torch.as_tensor(tokens, dtype=torch.int64, device=device)
