"""Adapters for captioning models: encoder-decoder models, and language models with image patches as tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from gradcam.adapters.base import CaptionerAdapter, ModelRun
from gradcam.adapters.tokenizers import UNSPACED_LETTER, WORD_MARKERS, encode_continuation, load_tokenizer
from gradcam.errors import ModelError, TargetError
from gradcam.hooks.containers import Batch, to_batch
from gradcam.hooks.preserve import preserve_state

PIXELS = "pixel_values"
# In these arguments, 0 marks a text token.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "image_embeds_position_mask")
MAX_CAPTION_TOKENS = 40
PROMPT = "Describe the picture in a sentence."


class GenerativeCaptioner(CaptionerAdapter):
    """A captioner that generates a caption, and then computes the logits of all its tokens in one forward pass.

    The logits of a token are at the position before the token, and depend on earlier tokens only. `tower` is the image
    encoder's module name. `starts` and `ends` are the names of the configuration settings for start and end tokens; the
    first setting with a value is used. `plain_prompt` is the form of a prompt if the processor has no chat template; None
    if the model takes no prompt.
    """

    plain_prompt: ClassVar[str | None] = None
    tower: ClassVar[str] = "vision_model"
    starts: ClassVar[tuple[str, ...]] = ("decoder_start_token_id", "bos_token_id")
    ends: ClassVar[tuple[str, ...]] = ("eos_token_id",)

    @property
    def ids_name(self) -> str:
        """Return the name of the argument that takes the caption's tokens."""
        return "input_ids"

    @property
    def own_layer(self) -> str | None:
        # Use the output after the final norm. Before the norm, gradient times activation would sum to zero, because the
        # norm is scale-invariant.
        return f"{self.tower}:last_hidden_state"

    def process(self, images: Sequence[NDArray[Any]], prompt: str) -> dict[str, Tensor]:
        """Return the output of the model's own processor for a prompt with images (H,W,3), RGB, uint8.

        Raises `ModelError` if the processor cannot write such a prompt, or belongs to another model.
        """
        processor, pil_images = self.processor, [Image.fromarray(image) for image in images]
        try:
            text = self._format_prompt(processor, prompt, len(images))
            start = getattr(processor.tokenizer, "bos_token", None)  # Chat templates may already contain it.
            options: dict[str, Any] = {"add_special_tokens": False} if start and text.startswith(start) else {}
            nested: Any = pil_images if len(pil_images) == 1 else [pil_images]
            output = processor(images=nested, text=[text], return_tensors="pt", **options)
            return {PIXELS: output[PIXELS]} | {k: v for k, v in output.items() if isinstance(v, Tensor)}
        except Exception as error:  # Processors raise errors of any type.
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            problem = f"{type(processor).__name__} cannot write a prompt for {type(self.model).__name__} ({reason})"
            advice = "set the chat_template of the model's own processor, or pass its output to gradcam.explain"
            raise ModelError(f"{problem}: {advice}.") from error

    def _format_prompt(self, processor: Any, prompt: str, images: int) -> str:
        if getattr(processor, "chat_template", None):
            content = [*[{"type": "image"}] * images, {"type": "text", "text": prompt}]
            messages = [{"role": "user", "content": content}]
            return str(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        marks = str(getattr(processor, "image_token", "")) * images
        return (self.plain_prompt or "{prompt}").format(images=marks, prompt=prompt)

    def write(self, images: Any, max_tokens: int = MAX_CAPTION_TOKENS) -> list[int]:
        batch = to_batch(images)
        if batch.samples > 1:
            problem = f"A caption describes one image, but the batch has {batch.samples}"
            raise TargetError(f"{problem}: pass the images one by one.")
        arguments, prompt_length = self.complete_arguments(batch.copy()), self.begin_text(batch)[self.ids_name].shape[1]
        max_new_tokens = max_tokens if self._max_length is None else min(max_tokens, self._max_length - prompt_length)
        options = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens}
        with preserve_state(self.model), torch.no_grad():
            tokens: list[int] = self.model.generate(**arguments, **options)[0, prompt_length:].tolist()
        ends = self._find_setting(self.ends)
        length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        if length == 0:
            problem = f"{type(self.model).__name__} writes an empty caption for this image"
            raise TargetError(f"{problem}: there is no word to explain.")
        return tokens[:length]

    def bind(self, model: nn.Module, batch: Batch, tokens: Sequence[int]) -> tuple[nn.Module, Batch]:
        arguments, images = self.begin_text(batch), batch.samples
        texts, prompt_length = arguments[self.ids_name].shape
        if texts not in (1, images):
            problem = f"There are {texts} texts in {self.ids_name} for {images} images"
            raise TargetError(f"{problem}: pass one text per image, or one for all images.")
        self._check_tokens(tokens, prompt_length)
        caption = torch.tensor([list(tokens)], dtype=torch.int64, device=batch.device)
        mask_name = self.ids_name.replace("input_ids", "attention_mask")
        if mask_name in arguments and not bool(arguments[mask_name][:, -1].all()):
            raise TargetError("A prompt ends with padding, so no word can follow it: pad prompts on the left.")
        for name in (self.ids_name, mask_name, *TOKEN_TYPES):
            if name in arguments:
                # Append the last token too, although the logits after the last token are not used. Otherwise, a text
                # could consist of one token, and some models would broadcast this token over all images.
                values = caption if name == self.ids_name else torch.full_like(caption, int(name == mask_name))
                prompt = arguments[name].expand(images, -1)
                arguments[name] = torch.cat([prompt, values.to(prompt.dtype).expand(images, -1)], 1)
        options = {"use_cache": False, "logits_to_keep": len(tokens) + 1}  # Save time and memory.
        arguments.update({name: options[name] for name in self.find_options() if name in options})
        return self.wrap(model), replace(batch, args=(), kwargs=arguments)

    def read(self, run: ModelRun, batch: Batch, tokens: Sequence[int]) -> Tensor:
        return run.last_output().logits[:, -len(tokens) - 1 : -1]

    @property
    def tokenizer(self) -> Any:
        """Return the model's own tokenizer. Raise `TargetError` if there is none."""
        return getattr(self.processor, "tokenizer", None) or load_tokenizer(
            str(getattr(self.model, "name_or_path", ""))
        )

    def decode_tokens(self, tokens: Sequence[int]) -> list[str]:
        tokenizer = self.tokenizer
        return [tokenizer.decode([token]).strip() or str(tokenizer.convert_ids_to_tokens(token)) for token in tokens]

    def split_caption(self, tokens: Sequence[int]) -> list[str]:
        # If each token were decoded separately, the spaces between words would be lost.
        captions = [self.tokenizer.decode(list(tokens[: i + 1])) for i in range(len(tokens))]
        # Later tokens can shorten the text: they complete a character, or remove the space before a dot.
        ends = [*accumulate(map(len, reversed(captions)), min), 0]
        return [captions[-1][start:end] for start, end in pairwise(reversed(ends))]

    def encode_sentence(self, text: str, batch: Batch) -> list[int]:
        prompt, tokenizer = self.begin_text(batch)[self.ids_name][0].tolist(), self.tokenizer
        is_joined = tokenizer.decode(prompt)[-1:].isspace() or UNSPACED_LETTER.match(text)
        gap: str | None = "" if is_joined else " "
        if gap and not tokenizer.decode(prompt[-1:], skip_special_tokens=True):
            gap = None  # After special tokens, such as the start token, a text begins.
        return encode_continuation(tokenizer, text, gap)

    def encode_alternative(self, text: str, token: int) -> int:
        # The alternative begins a word if the token does.
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        return encode_continuation(self.tokenizer, text, " " if piece.startswith(WORD_MARKERS) else "")[0]

    def complete_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the model's arguments by name. Add required arguments that the caller did not pass."""
        if batch.args and (len(batch.args) > 1 or batch.kwargs):
            expected = f"a dict of all arguments by name, such as {PIXELS} and input_ids"
            problem = f"{len(batch.args)} argument(s) were passed to {type(self.model).__name__} without a name"
            raise TargetError(f"{problem}: pass only the images, or {expected}.")
        return {PIXELS: batch.pictures} if batch.args else dict(batch.kwargs)

    def begin_text(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments. The text before the caption is the caller's prompt, or else the start token."""
        arguments = self.complete_arguments(batch)
        if self.ids_name not in arguments:
            arguments[self.ids_name] = self._repeat(self._find_setting(self.starts)[:1], batch)
        return arguments

    def find_options(self) -> Sequence[str]:
        """Return the names of the forward options that the model accepts."""
        # All models except BLIP accept `use_cache`. Some pass `use_cache` on to a language model as a keyword argument.
        return ["use_cache", *inspect.signature(self.model.forward).parameters]

    def _repeat(self, tokens: Sequence[int], batch: Batch) -> Tensor:
        if not tokens:
            advice = f"pass the tokens before the first word as {self.ids_name}, in a dict with {PIXELS}."
            raise TargetError(f"{type(self.model).__name__} defines no start token for captions: {advice}")
        return torch.tensor([list(tokens)], dtype=torch.int64, device=batch.device).repeat(batch.samples, 1)

    def _find_setting(self, names: Sequence[str]) -> list[int]:
        """Return the token ids of the first setting that has a value in the generation, model or text config."""
        config = self.model.config
        configs = (getattr(self.model, "generation_config", None), config, config.get_text_config(decoder=True))
        values = (getattr(config, name, None) for name in names for config in configs)
        setting: int | Sequence[int] = next((value for value in values if value is not None), [])
        return [setting] if isinstance(setting, int) else list(setting)

    @property
    def _max_length(self) -> int | None:
        """Return the model's maximum text length in tokens; None if there is no limit."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def _check_tokens(self, tokens: Sequence[int], prompt_length: int) -> None:
        if self._max_length is not None and prompt_length + len(tokens) > self._max_length:
            lengths = f"The prompt has {prompt_length} token(s) and the caption {len(tokens)}"
            limit = f"{type(self.model).__name__} takes {self._max_length} tokens in total"
            raise TargetError(f"{lengths}, but {limit}. Shorten the caption.")
        count = self.model.get_input_embeddings().weight.shape[0]
        if unknown := [token for token in tokens if not 0 <= token < count]:
            problem = f"Token {unknown[0]} is not in the vocabulary of this {type(self.model).__name__}"
            raise TargetError(f"{problem}: the vocabulary has {count} tokens, 0 to {count - 1}.")


class EncoderDecoder(GenerativeCaptioner):
    """VisionEncoderDecoderModel: an image encoder, such as ViT or Swin, and a decoder, such as GPT-2 or BERT."""

    tower = "encoder"
    ids_name = "decoder_input_ids"


class Blip(GenerativeCaptioner):
    """BLIP. Its processor appends an end token to the prompt; as in BLIP's `generate`, this end token is removed."""

    plain_prompt = "{prompt}"
    ends = ("sep_token_id",)

    def begin_text(self, batch: Batch) -> dict[str, Any]:
        arguments = self.complete_arguments(batch)
        if self.ids_name not in arguments:
            return super().begin_text(batch)
        prompt = arguments[self.ids_name][:, :-1].clone()
        prompt[:, 0] = self._find_setting(self.starts)[0]
        mask = arguments.get("attention_mask")
        return arguments | {self.ids_name: prompt} | ({} if mask is None else {"attention_mask": mask[:, :-1]})

    def find_options(self) -> Sequence[str]:
        return [name for name in super().find_options() if name != "use_cache"]  # BLIP's forward has no `use_cache`.


class Git(GenerativeCaptioner):
    """GIT: a language model that reads the image patches before the text."""

    # This layer ends with a norm. Before the norm, gradient times activation would sum to zero over each patch.
    own_layer = "git.visual_projection"


class Blip2(GenerativeCaptioner):
    """BLIP-2 and InstructBLIP: queries attend to patches, and a language model reads the queries at placeholder tokens.

    A decoder-only language model continues the prompt. An encoder-decoder model reads the prompt in its encoder.
    """

    plain_prompt = "{prompt}"

    @property
    def usual_prompts(self) -> Sequence[str] | None:
        return (PROMPT,) if self.model.config.model_type == "instructblip" else None  # Its queries read the prompt.

    @property
    def ids_name(self) -> str:
        return "input_ids" if self.model.config.use_decoder_only_language_model else "decoder_input_ids"

    def complete_arguments(self, batch: Batch) -> dict[str, Any]:
        arguments = super().complete_arguments(batch)
        if "input_ids" not in arguments:
            placeholders = [self.model.config.image_token_index] * self.model.config.num_query_tokens
            prompt = [*placeholders, *self._find_setting(("bos_token_id",))[:1]]
            arguments["input_ids"] = self._repeat(prompt, batch)
        return arguments

    def find_options(self) -> Sequence[str]:
        return list(inspect.signature(self.model.language_model.forward).parameters)
