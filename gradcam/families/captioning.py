"""Models that write about a picture: encoders with a decoder behind them, and language models that read patches as words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from gradcam.errors import TargetError, join_names, shorten
from gradcam.families.base import Captioner, Seen
from gradcam.hooks.nested import Batch, to_batch
from gradcam.hooks.preserve import preserve_state

PICTURES = "pixel_values"
MASKS = ("attention_mask", "decoder_attention_mask")
TYPES = ("token_type_ids", "mm_token_type_ids")  # of pictures and of text, which is 0
MOST_WORDS = 40


class Writer(Captioner):
    """What all of them share: the words that were written so far are read again, and give the logits of the next one.
    One run serves all words of a caption, each of which sees only those before it. `row`: the argument that takes them.
    `tower`: the module that sees the pictures. `start`: the settings whose tokens begin a text, the first that is set."""

    row: ClassVar[str] = "input_ids"
    tower: ClassVar[str] = "vision_model"
    start: ClassVar[tuple[str, ...]] = ("bos_token_id",)

    @property
    def own_layer(self) -> str | None:
        return find_block(self.model, self.tower, self._feature_layer)

    @property
    def _feature_layer(self) -> int:
        """Which of the tower's hidden states the words see, as the model's settings say it: the last of several."""
        layer = getattr(self._config, "vision_feature_layer", None)
        return -1 if layer is None else layer if isinstance(layer, int) else max(layer, key=lambda it: it % 10**6)

    @property
    def _config(self) -> Any:
        return cast("Any", self.model).config

    @property
    def _reader(self) -> nn.Module:
        """The module that takes the options of reading."""
        return self.model

    def write(self, images: Any, most: int = MOST_WORDS) -> list[int]:
        batch = to_batch(images)
        if batch.images > 1:
            raise TargetError(f"A caption is written of one picture, and these are {batch.images}: give them one by one.")
        own, begun = batch.copy(), self._begin(batch)[self.row].shape[1]
        with preserve_state(self.model), torch.no_grad():
            written = cast("Any", self.model).generate(
                **self._complete(own), do_sample=False, num_beams=1, max_new_tokens=most
            )
        tokens: list[int] = written[0, begun:].tolist()
        ends = self._setting("eos_token_id", "sep_token_id")
        last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        if last == 0:
            raise TargetError(f"{type(self.model).__name__} writes nothing of this picture: its caption is empty.")
        return tokens[:last]

    def bind(self, model: nn.Module, batch: Batch, tokens: Sequence[int]) -> tuple[nn.Module, Batch]:
        self._check(tokens)
        given, images = self._begin(batch), batch.images
        new = torch.tensor([list(tokens)], dtype=torch.int64, device=batch.device)
        # The last one, too, though nothing is read behind it: a row of one token alone might be taken for a setting.
        given[self.row] = torch.cat([given[self.row].expand(images, -1), new.expand(images, -1)], 1)
        for name in (*MASKS, *TYPES):
            if name in given and (name != MASKS[0] or self.row == "input_ids"):
                rows = given[name].expand(images, -1)
                if name in MASKS and not bool(rows[:, -1].all()):
                    raise TargetError("A prompt ends with padding, behind which no word follows: pad at the left.")
                more = rows.new_full((images, len(tokens)), 1 if name in MASKS else 0)
                given[name] = torch.cat([rows, more], 1)
        takes = inspect.signature(self._reader.forward).parameters
        options = {"use_cache": False, "logits_to_keep": len(tokens) + 1}
        given.update({name: value for name, value in options.items() if name in takes})
        return self.wrap(model), replace(batch, args=(), kwargs=given)

    def read(self, seen: Seen, batch: Batch, tokens: Sequence[int]) -> Tensor:
        logits: Tensor = seen.last().logits
        return logits[:, -len(tokens) - 1 : -1]

    def words(self, tokens: Sequence[int]) -> list[str]:
        tokenizer = _load_tokenizer(str(getattr(self.model, "name_or_path", "")))
        found = [(tokenizer.decode([token]).strip(), token) for token in tokens]
        return [word or str(tokenizer.convert_ids_to_tokens(token)) for word, token in found]

    def _complete(self, batch: Batch) -> dict[str, Any]:
        """The arguments by their names, with those that a caption needs."""
        if batch.args and (len(batch.args) > 1 or batch.kwargs):
            raise TargetError(
                f"{type(self.model).__name__} takes the pictures alone, or a dict of its arguments, such as {PICTURES} and "
                f"input_ids: {len(batch.args)} came without a name."
            )
        return {PICTURES: batch.pictures} if batch.args else dict(batch.kwargs)

    def _begin(self, batch: Batch) -> dict[str, Any]:
        """The same, and in `row` all that stands before the first word: the caller's beginning, or the model's."""
        given = self._complete(batch)
        if self.row not in given:
            first = self._setting(*self.start)
            if not first:
                raise TargetError(
                    f"{type(self.model).__name__} does not say what a caption begins with: give the {self.row} before the "
                    f"first word, in a dict with {PICTURES}."
                )
            given[self.row] = torch.full((batch.images, 1), first[0], dtype=torch.int64, device=batch.device)
        return given

    def _setting(self, *names: str) -> list[int]:
        """The tokens of the first of these settings that is set, of generation, of the model, or of its text."""
        model = cast("Any", self.model)
        places = (getattr(model, "generation_config", None), model.config, model.config.get_text_config(decoder=True))
        for name in names:
            for place in places:
                value = getattr(place, name, None)
                if value is not None:
                    return [value] if isinstance(value, int) else list(value)
        return []

    def _check(self, tokens: Sequence[int]) -> None:
        count = cast("Any", self.model).get_input_embeddings().weight.shape[0]
        strange = [token for token in tokens if not 0 <= token < count]
        if strange:
            raise TargetError(
                f"There is no token {join_names(strange[:3])} in the vocabulary of {type(self.model).__name__}, which has "
                f"{count}: 0 to {count - 1}."
            )


class EncoderDecoder(Writer):
    """VisionEncoderDecoderModel: an encoder of pictures, such as ViT or Swin, and a decoder, such as GPT-2 or BERT."""

    row = "decoder_input_ids"
    tower = "encoder"
    start = ("decoder_start_token_id", "bos_token_id")


