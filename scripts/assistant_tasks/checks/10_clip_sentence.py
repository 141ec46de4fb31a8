"""Similarities and map equal those of transformers' own preprocessing, tokenizer and model with plain autograd."""

import torch
from common import ASSETS, differentiate, run_check, weigh_channels
from PIL import Image


def check(answer):
    save_clip("my-clip")
    photo, sentences = str(ASSETS / "chelsea.jpg"), ["a dog on the sofa", "a cup of coffee", "a cat"]
    best, similarities, received = answer.explain("my-clip", photo, sentences)
    expected, embeddings, model, pixels = compare_with_sentences("my-clip", photo, sentences)
    assert len(similarities) == len(sentences), f"{len(similarities)} similarities of {len(sentences)} sentences"
    torch.testing.assert_close(torch.tensor([float(s) for s in similarities]), expected, rtol=1e-3, atol=1e-4)
    number = int(expected.argmax())
    assert best == sentences[number], f"the best sentence is {best!r}: wrong"
    expected_map = compute_map(model, pixels, embeddings[number])
    received = torch.as_tensor(received).detach()
    assert received.shape == expected_map.shape, f"the map has the shape {tuple(received.shape)}"
    # The package reads and resizes photographs with OpenCV and transformers with Pillow, so pixels differ slightly.
    correlation = torch.corrcoef(torch.stack([received.flatten(), expected_map.flatten()]))[0, 1]
    assert correlation > 0.999, f"the map has a correlation of {float(correlation):.3f} with the expected one"


def compute_map(model, pixels, embedding):
    def score(output):
        return torch.cosine_similarity(model.visual_projection(output.pooler_output), embedding[None])

    tokens = differentiate(model.vision_model, "encoder.layers.1.layer_norm1", [pixels], score)[:2]
    return weigh_channels(*[values[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2) for values in tokens]).relu()[0]


def compare_with_sentences(folder, photo, sentences):
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    processor = CLIPImageProcessor.from_pretrained(folder)
    pixels = processor(Image.open(photo).convert("RGB"), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        words = tokenizer(sentences, return_tensors="pt", padding=True)
        output = model(input_ids=words["input_ids"], attention_mask=words["attention_mask"], pixel_values=pixels)
    return torch.cosine_similarity(output.image_embeds, output.text_embeds), output.text_embeds, model, pixels


def save_clip(folder):
    """Save a small CLIP with random weights and a tokenizer of a few words."""
    import tokenizers
    import transformers

    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", "a", "the", "cat", "dog", "cup", "of", "on", "sofa", "coffee"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        "[BOS] $A [EOS]", None, [("[BOS]", 1), ("[EOS]", 2)]
    )
    special = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=12, **special).save_pretrained(folder)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ends = {"vocab_size": len(words), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = {**small, **ends, "max_position_embeddings": 12}
    vision = {**small, "image_size": 32, "patch_size": 8}
    torch.manual_seed(3)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    transformers.CLIPModel(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPImageProcessor(**sizes).save_pretrained(folder)


if __name__ == "__main__":
    run_check(check)
