"""Models that write about a picture: decoders behind an encoder, and language models that read patches as words."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from PIL import Image
from torch import Tensor, nn

from gradcam.errors import ModelError, TargetError
from gradcam.families.base import Captioner, Seen
from gradcam.families.tokens import load_tokenizer
from gradcam.hooks.nested import Batch, to_batch
from gradcam.hooks.preserve import preserve_state

PICTURES = "pixel_values"
TYPES = ("token_type_ids", "mm_token_type_ids")  # of what each token is: 0 for a word
MOST_WORDS = 40
SIDE = 256  # of a picture, in whose place a prompt keeps room


class Writer(Captioner):
    """What all of them share: the words so far are read again, and behind each of them stand the logits of the next.
    One run serves all words of a caption, since each sees only what is before it. `tower`: the module that sees the
    pictures. `starts`, `ends`: the settings whose tokens begin and end a text, of which the first that is set counts."""

    tower: ClassVar[str] = "vision_model"
    starts: ClassVar[tuple[str, ...]] = ("bos_token_id",)
    ends: ClassVar[tuple[str, ...]] = ("eos_token_id",)

    @property
    def row(self) -> str:
        """The argument that takes the words."""
        return "input_ids"

    @property
    def own_layer(self) -> str | None:
        # Not the last block: a norm behind it takes no notice of how long a token is, so that gradient times activation
        # sums up to zero there, whatever the token holds.
        return f"{self.tower}:last_hidden_state"

    @property
    def config(self) -> Any:
        return cast("Any", self.model).config

    def write(self, images: Any, most: int = MOST_WORDS) -> list[int]:
        batch = to_batch(images)
        if batch.images > 1:
            raise TargetError(
                f"A caption describes one image, but the batch has {batch.images}: pass the images one by one."
            )
        given, begun = self.complete(batch.copy()), self.begin(batch)[self.row].shape[1]
        room = most if self._longest is None else min(most, self._longest - begun)
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": room}
        with preserve_state(self.model), torch.no_grad():
            written: list[int] = cast("Any", self.model).generate(**given, **options)[0, begun:].tolist()
        ends = self._find_setting(self.ends)
        length = next((place for place, token in enumerate(written) if token in ends), len(written))
        if length == 0:
            raise TargetError(
                f"{type(self.model).__name__} writes an empty caption for this image: there is no word to explain."
            )
        return written[:length]

    def bind(self, model: nn.Module, batch: Batch, tokens: Sequence[int]) -> tuple[nn.Module, Batch]:
        given, images = self.begin(batch), batch.images
        texts, begun = given[self.row].shape
        if texts not in (1, images):
            raise TargetError(
                f"There are {texts} texts in {self.row} for {images} images: pass one text per image, or one for all images."
            )
        self._check(tokens, begun)
        new = torch.tensor([list(tokens)], dtype=torch.int64, device=batch.device)
        own_mask = self.row.replace("input_ids", "attention_mask")
        if own_mask in given and not bool(given[own_mask][:, -1].all()):
            raise TargetError("A prompt ends with padding, after which no word can follow: pad prompts on the left.")
        for name in (self.row, own_mask, *TYPES):
            if name in given:
                # The last word, too, though nothing is read behind it: a row of one number may be one for all images.
                more = new if name == self.row else torch.full_like(new, int(name == own_mask))
                rows = given[name].expand(images, -1)
                given[name] = torch.cat([rows, more.to(rows.dtype).expand(images, -1)], 1)
        options = {"use_cache": False, "logits_to_keep": len(tokens) + 1}  # what is not read is not computed, nor kept
        takes = self.find_options()
        given.update({name: value for name, value in options.items() if name in takes})
        return self.wrap(model), replace(batch, args=(), kwargs=given)

    def read(self, seen: Seen, batch: Batch, tokens: Sequence[int]) -> Tensor:
        logits: Tensor = seen.last().logits
        return logits[:, -len(tokens) - 1 : -1]

    def words(self, tokens: Sequence[int]) -> list[str]:
        tokenizer = load_tokenizer(str(getattr(self.model, "name_or_path", "")))
        return [tokenizer.decode([it]).strip() or str(tokenizer.convert_ids_to_tokens(it)) for it in tokens]

    def complete(self, batch: Batch) -> dict[str, Any]:
        """The arguments by their names, with those that the model cannot do without."""
        if batch.args and (len(batch.args) > 1 or batch.kwargs):
            raise TargetError(
                f"{type(self.model).__name__} takes the images alone, or a dict of its arguments by name, such as "
                f"{PICTURES} and input_ids: {len(batch.args)} arguments were passed without a name."
            )
        return {PICTURES: batch.pictures} if batch.args else dict(batch.kwargs)

    def begin(self, batch: Batch) -> dict[str, Any]:
        """The same, and in `row` all that stands before the first word: the caller's beginning, or the model's."""
        given = self.complete(batch)
        if self.row not in given:
            given[self.row] = self._repeat(self._find_setting(self.starts)[:1], batch)
        return given

    def find_options(self) -> Sequence[str]:
        """The names of the options that a run takes."""
        return ["use_cache", *inspect.signature(self.model.forward).parameters]  # the first is handed on by all of them

    def _repeat(self, tokens: Sequence[int], batch: Batch) -> Tensor:
        if not tokens:
            raise TargetError(
                f"{type(self.model).__name__} defines no start token for captions: pass the tokens before the first "
                f"word as {self.row}, in a dict with {PICTURES}."
            )
        return torch.tensor([list(tokens)], dtype=torch.int64, device=batch.device).repeat(batch.images, 1)

    def _find_setting(self, names: Sequence[str]) -> list[int]:
        """The tokens of the first of these settings that is set: for writing, of the model, or of its text."""
        places = (
            getattr(self.model, "generation_config", None),
            self.config,
            self.config.get_text_config(decoder=True),
        )
        values = (getattr(place, name, None) for name in names for place in places)
        found: int | Sequence[int] = next((value for value in values if value is not None), [])
        return [found] if isinstance(found, int) else list(found)

    @property
    def _longest(self) -> int | None:
        """How many tokens a text may have, as far as the model's positions are counted."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def _check(self, tokens: Sequence[int], begun: int) -> None:
        if self._longest is not None and begun + len(tokens) > self._longest:
            raise TargetError(
                f"The prompt has {begun} token(s) and the caption {len(tokens)}, but {type(self.model).__name__} takes "
                f"{self._longest} in total. Shorten the caption."
            )
        count = cast("Any", self.model).get_input_embeddings().weight.shape[0]
        strange = [token for token in tokens if not 0 <= token < count]
        if strange:
            raise TargetError(
                f"There is no token {strange[0]} in the vocabulary of this {type(self.model).__name__}: it "
                f"has {count} tokens, 0 to {count - 1}."
            )


class EncoderDecoder(Writer):
    """VisionEncoderDecoderModel: an encoder of pictures, such as ViT or Swin, and a decoder, such as GPT-2 or BERT."""

    tower = "encoder"
    starts = ("decoder_start_token_id", "bos_token_id")

    @property
    def row(self) -> str:
        return "decoder_input_ids"


class Blip(Writer):
    """BLIP. Its processor ends a prompt as a whole text ends: what writes on takes that end away."""

    starts = ("bos_token_id",)
    ends = ("sep_token_id",)

    def begin(self, batch: Batch) -> dict[str, Any]:
        given = self.complete(batch)
        if self.row not in given:
            return super().begin(batch)
        rows = given[self.row][:, :-1].clone()
        rows[:, 0] = self._find_setting(self.starts)[0]
        mask = given.get("attention_mask")
        return given | {self.row: rows} | ({} if mask is None else {"attention_mask": mask[:, :-1]})

    def find_options(self) -> Sequence[str]:
        return [name for name in super().find_options() if name != "use_cache"]  # nothing is kept, nor is that known


class Git(Writer):
    """GIT: a language model that reads the patches before the words."""

    tower = "git.image_encoder"


class Blip2(Writer):
    """BLIP-2 and InstructBLIP: queries to the patches, which a language model reads in the places kept for them. That
    model has a decoder alone, which goes on behind the prompt, or an encoder too, which reads it."""

    @property
    def row(self) -> str:
        return "input_ids" if self.config.use_decoder_only_language_model else "decoder_input_ids"

    def complete(self, batch: Batch) -> dict[str, Any]:
        given = super().complete(batch)
        if "input_ids" not in given:
            places = [self.config.image_token_index] * self.config.num_query_tokens
            given["input_ids"] = self._repeat([*places, *self._find_setting(self.starts)[:1]], batch)
        return given

    def begin(self, batch: Batch) -> dict[str, Any]:
        given = self.complete(batch)
        if self.row not in given:
            given[self.row] = self._repeat(self._find_setting(("decoder_start_token_id", "bos_token_id"))[:1], batch)
        return given

    def find_options(self) -> Sequence[str]:
        return list(inspect.signature(cast("Any", self.model).language_model.forward).parameters)


class Llava(Writer):
    """LLaVA and its like: a language model that reads patches in a prompt, in the places kept for them."""

    tower = "model.vision_tower"

    @property
    def own_layer(self) -> str | None:
        states = getattr(self.config, "vision_feature_layer", None)
        return super().own_layer if states is None else find_block(self.model, self.tower, states)

    @property
    def usual_prompts(self) -> Sequence[str]:
        return ["Describe the picture in a sentence."]

    def to_prompts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """A question, as its processor asks it of a picture. Raises `ModelError` for several, and without a processor."""
        from transformers import AutoProcessor

        folder = str(getattr(self.model, "name_or_path", ""))
        if len(prompts) > 1:
            raise ModelError(f"{type(self.model).__name__} takes one prompt, but {len(prompts)} were given.")
        try:
            processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompts[0]}]}]
            if getattr(processor, "chat_template", None):
                text = processor.apply_chat_template(said, add_generation_prompt=True)
            else:
                text = f"USER: {processor.image_token}\n{prompts[0]} ASSISTANT:"
            given = processor(images=Image.new("RGB", (SIDE, SIDE)), text=text, return_tensors="pt")
        except Exception as error:  # whatever the library raises for files that are missing or broken
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"No processor was found for the model, to put an image into a prompt ({reason}): save it in the model's "
                "folder with processor.save_pretrained(folder), and load the model from that folder."
            ) from error
        return {name: given[name] for name in (self.row, "attention_mask")}

    def complete(self, batch: Batch) -> dict[str, Any]:
        given = super().complete(batch)
        if self.row not in given:
            raise TargetError(
                f"{type(self.model).__name__} needs a prompt with a placeholder for the image: pass the output of its "
                f"processor for the prompt and the image, a dict with {PICTURES}, {self.row} and attention_mask."
            )
        return given


class InternVl(Llava):
    """InternVL, which reads the last hidden state behind its norm."""

    @property
    def own_layer(self) -> str | None:
        return super(Llava, self).own_layer if self.config.vision_feature_layer == -1 else super().own_layer


def find_block(model: nn.Module, tower: str, states: int | Sequence[int]) -> str | None:
    """The dotted name of the tower's block that gives the last of these hidden states, of which 0 is before the first
    block; None where there is no such block."""
    blocks = (it for it in model.get_submodule(tower).named_modules() if isinstance(it[1], nn.ModuleList))
    for name, found in blocks:
        several = [states] if isinstance(states, int) else states
        number = max(state - 1 if state >= 0 else len(found) + state for state in several)
        return f"{tower}.{name}.{number}" if number >= 0 else None
    return None
