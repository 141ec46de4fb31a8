"""Test the detectors of transformers, against their own postprocessing and autograd by hand through the full model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import gradcam
from gradcam import adapters
from gradcam.adapters.base import Detections, DetectorAdapter
from gradcam.errors import GradcamWarning, ImageError, ModelError, TargetError
from gradcam.hooks.containers import list_tensors, map_tensors, to_batch
from gradcam.targets.boxes import Box

T = pytest.importorskip("transformers")

CLASSES, QUERIES, SIZE = 5, 9, (64, 96)
# Each kind, and the kind whose image processor its checkpoints use.
PROCESSORS = {
    "Detr": "Detr", "TableTransformer": "Detr", "Yolos": "Yolos", "ConditionalDetr": "ConditionalDetr",
    "DabDetr": "ConditionalDetr", "DeformableDetr": "DeformableDetr", "LwDetr": "DeformableDetr", "RfDetr": "RfDetr",
    "RTDetr": "RTDetr", "RTDetrV2": "RTDetr", "DFine": "RTDetr", "Deimv2": "RTDetr", "OwlViT": "OwlViT", "Owlv2": "Owlv2",
}  # fmt: skip
GROUNDED = ("GroundingDino", "MMGroundingDino")
KINDS = (*PROCESSORS, *GROUNDED)
OF_CANVAS = ("RTDetr", "RTDetrV2", "DFine", "Deimv2")  # boxes are relative to the input, padding included
# Queries sample features near a reference point.
SAMPLING = ("DeformableDetr", "LwDetr", "RfDetr", *OF_CANVAS, *GROUNDED)

# "20 21 . 22 ." and "23 ." between BERT's first and last token, and the positions of the tokens of their phrases.
TEXTS = {
    "input_ids": torch.tensor([[101, 20, 21, 1012, 22, 1012, 102], [101, 23, 1012, 102, 0, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
}
PHRASES = (((1, 2), (4,)), ((1,),))
# Three queries for each of two images. The second image has two queries; its third row is padding.
QUERY_ROWS = [[58, 3, 4, 59], [58, 5, 59, 0], [58, 9, 8, 59], [58, 3, 4, 59], [58, 5, 59, 0], [0] * 4]
QUERIED = {"input_ids": torch.tensor(QUERY_ROWS), "attention_mask": (torch.tensor(QUERY_ROWS) > 0).long()}


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    """Set the default dtype to float64, because some of these models create tensors in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def configure(kind: str) -> Any:
    resnet: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 20], "depths": [1] * 4}
    resnet |= {"layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
    vit = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
    words = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    decoder: dict[str, Any] = {"num_queries": QUERIES, "num_labels": CLASSES, "d_model": 32, "decoder_layers": 2}
    decoder |= {"decoder_ffn_dim": 32, "decoder_attention_heads": 4}
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32}
    hybrid = {"encoder_hidden_dim": 32, "encoder_in_channels": [12, 16, 20], "encoder_attention_heads": 4}
    hybrid |= {"encoder_ffn_dim": 32, "decoder_in_channels": [32] * 3, "num_denoising": 0}
    light = {"decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4}
    light |= {"group_detr": 1, "c2f_num_blocks": 1}
    if kind == "Yolos":
        sizes = {"intermediate_size": 32, "image_size": list(SIZE), "num_detection_tokens": QUERIES}
        options = vit | sizes | {"num_labels": CLASSES}
    elif kind.startswith("Owl"):
        text = words | {"vocab_size": 60, "max_position_embeddings": 8, "bos_token_id": 58, "eos_token_id": 59}
        options = {"text_config": text, "vision_config": vit | {"intermediate_size": 32}, "projection_dim": 32}
    elif kind in GROUNDED:
        swin = {"image_size": 64, "embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 1, 2, 2], "window_size": 2}
        del decoder["num_labels"]
        options = decoder | encoder | {"text_config": T.BertConfig(vocab_size=1100, **words), "max_text_len": 16}
        options["backbone_config"] = T.SwinConfig(**swin, out_features=resnet["out_features"])
    elif kind in ("RTDetr", "RTDetrV2"):
        options = decoder | hybrid | {"backbone_config": T.RTDetrResNetConfig(**resnet)}
    elif kind in ("DFine", "Deimv2"):
        stages = {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 12, 16], "stage_mid_channels": [8] * 4}
        stages |= {"stage_out_channels": [8, 12, 16, 20], "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4}
        stages |= {"out_features": resnet["out_features"], "hidden_sizes": [8, 12, 16, 20], "depths": [1] * 4}
        options = decoder | hybrid | {"depth_mult": 0.34, "backbone_config": T.HGNetV2Config(**stages)}
    elif kind == "LwDetr":
        windows = {"pretrain_image_size": 64, "num_windows": 4, "window_block_indices": [0]}
        backbone = T.LwDetrViTConfig(**vit, **windows, out_features=["stage1", "stage2"])
        options = decoder | light | {"backbone_config": backbone, "projector_scale_factors": [2.0, 0.5]}
    elif kind == "RfDetr":
        backbone = T.RfDetrDinov2Config(**vit, num_windows=2, out_features=["stage1", "stage2"])
        options = decoder | light | {"backbone_config": backbone}
    else:
        options = decoder | encoder | {"backbone_config": T.ResNetConfig(**resnet)}
        options |= {"hidden_size": 32} if kind == "DabDetr" else {}
    return getattr(T, f"{kind}Config")(**options)


def build(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return getattr(T, f"{kind}ForObjectDetection")(configure(kind)).eval()


@functools.cache
def lively(kind: str) -> nn.Module:
    """Return a model with distinct scores above the threshold; with fresh weights, all scores are nearly equal."""
    model = build(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 / parameter[0].numel() ** 0.5)
            else:
                parameter.normal_(0 if name.endswith("bias") else 1, 0.3)
            if name.startswith("class_labels_classifier") and len(parameter) == CLASSES + 1 and parameter.ndim == 1:
                parameter[2] += 3
            if kind in GROUNDED and name == "model.decoder.layer_norm.weight":
                parameter.mul_(0.6)
    return model


def make_inputs(kind: str, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Return two images, and two texts if the kind takes texts."""
    generator = torch.Generator().manual_seed(1)  # independent of the models built before
    pictures = torch.rand(2, 3, *((64, 64) if kind.startswith("Owl") else size), generator=generator)
    return {"pixel_values": pictures, **(QUERIED if kind.startswith("Owl") else TEXTS if kind in GROUNDED else {})}


def find(model: nn.Module, threshold: float | None = None) -> Any:
    """Return the reader; its default threshold is that of transformers."""
    family: Any = adapters.find_family(model, DetectorAdapter)
    family.threshold = family.threshold if threshold is None else threshold
    return family


def read(family: Any, inputs: Any) -> list[Detections]:
    batch = to_batch(inputs)
    return family.read(batch.run(family.wrap(family.model)), batch)


def by_transformers(kind: str, output: Any, sizes: Any, threshold: float | None) -> list[dict[str, Tensor]]:
    """Return the boxes that the processor of transformers reads, the highest-scoring first."""
    options = {} if threshold is None else {"threshold": threshold}
    if kind in GROUNDED:
        actual = [ground(*item, 0.25 if threshold is None else threshold) for item in zip(output.logits, PHRASES)]
        scale = torch.tensor([[width, height, width, height] for height, width in sizes], dtype=torch.float64)
        corners = T.image_transforms.center_to_corners_format(output.pred_boxes) * scale[:, None]
        actual = [entry | {"boxes": boxes[entry.pop("rows")]} for entry, boxes in zip(actual, corners)]
    else:
        processor = getattr(T, f"{PROCESSORS[kind]}ImageProcessor")()
        actual = processor.post_process_object_detection(output, target_sizes=torch.tensor(sizes), **options)
    orders = [item["scores"].argsort(descending=True, stable=True) for item in actual]
    return [{key: values[order] for key, values in entry.items()} for entry, order in zip(actual, orders)]


def ground(logits: Tensor, phrases: Any, threshold: float) -> dict[str, Tensor]:
    """Return each query's best phrase, scored by its best token, by loops: the processor of transformers returns words."""
    rows, scores, labels = [], [], []
    for row, tokens in enumerate(logits):
        rated = [max(1 / (1 + (-tokens[place]).exp()) for place in phrase) for phrase in phrases]
        best = max(range(len(rated)), key=lambda index: rated[index].item())
        if rated[best] > threshold:
            rows.append(row)
            scores.append(rated[best])
            labels.append(best)
    numbers = {"rows": torch.tensor(rows, dtype=torch.int64), "labels": torch.tensor(labels, dtype=torch.int64)}
    return numbers | {"scores": torch.stack(scores) if scores else logits.new_zeros(0)}


def assert_found(detections: list[Detections], expected: list[dict[str, Tensor]]) -> None:
    for actual_detections, expected_detections in zip(detections, expected, strict=True):
        assert torch.equal(actual_detections.labels, expected_detections["labels"])
        assert torch.allclose(actual_detections.scores, expected_detections["scores"], rtol=1e-9, atol=0)
        assert torch.allclose(actual_detections.boxes, expected_detections["boxes"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_are_those_of_transformers(kind: str) -> None:
    model, inputs = lively(kind), make_inputs(kind)
    output = model(**inputs)
    sizes = [tuple(inputs["pixel_values"].shape[2:])] * 2
    expected = by_transformers(kind, output, sizes, None)
    assert all(len(item["scores"]) for item in expected)
    assert_found(read(find(model), inputs), expected)
    everything = by_transformers(kind, output, sizes, 0.0)
    threshold = everything[0]["scores"].median().item()
    expected = by_transformers(kind, output, sizes, threshold)
    assert 0 < len(expected[0]["scores"]) < len(everything[0]["scores"])
    assert_found(read(find(model, threshold), inputs), expected)


@pytest.mark.parametrize("kind", PROCESSORS)
def test_more_pairs_than_are_kept(kind: str) -> None:
    """Check the limit on detections.

    Seven queries and 60 classes make 420 pairs; a kind keeps 100, or one per query. The last class often scores
    highest; in some kinds it means "no object".
    """
    model = lively(kind)
    queries, classes = 7, 60
    outputs = {"logits": torch.randn(1, queries, classes), "pred_boxes": torch.rand(1, queries, 4)}
    outputs["logits"][:, :4, -1] += 5
    output = type(model(**make_inputs(kind)))(**outputs)
    family, inputs = find(model, 0.0), make_inputs(kind)
    result = to_batch(inputs).run(family.wrap(model))
    result.calls["model"][-1] = type(result.calls["model"][-1])((), {}, output)
    actual = family.read(result, to_batch(inputs))
    assert_found(actual, by_transformers(kind, output, [tuple(inputs["pixel_values"].shape[2:])], 0.0))


def by_hand(kind: str, inputs: dict[str, Any], number: int, edge: int | None) -> Tensor:
    """Compute relu(sum over channels of gradient x activation) of each level by hand, resized to the finest and added.

    Negative values are clamped before they are added. The box of this number in each image is differentiated through
    the full graph.
    """
    model, activations = lively(kind), []

    def keep(module: nn.Module, args: Any, output: Any) -> Any:
        # Levels are computed from one another, so only the gradient of their readers may count.
        copied = map_tensors(output, Tensor.clone)
        activations.extend(tensor for tensor in list_tensors(copied) if tensor.is_floating_point())
        return copied

    inputs = inputs | {"pixel_values": inputs["pixel_values"].clone().requires_grad_()}
    handle = model.get_submodule(find(model).own_layer).register_forward_hook(keep)
    try:
        output = model(**inputs)
    finally:
        handle.remove()
    actual = by_transformers(kind, output, [tuple(inputs["pixel_values"].shape[2:])] * 2, None)
    maps = []
    for i, item in enumerate(actual):
        value = item["scores"][number] if edge is None else item["boxes"][number, edge]
        gradients = torch.autograd.grad(value, activations, retain_graph=True, allow_unused=True)
        levels = [to_grid(kind, a * g)[i].sum(0).relu() for a, g in zip(activations, gradients) if g is not None]
        finest = max((tuple(level.shape) for level in levels), key=lambda shape: shape[0] * shape[1])
        maps.append(sum(interpolate(level[None, None], finest, mode="bicubic").clamp(min=0) for level in levels)[0])
    return torch.stack(maps)


def to_grid(kind: str, values: Tensor) -> Tensor:
    if kind == "Yolos":
        return values[:, 1:-QUERIES].transpose(1, 2).reshape(len(values), -1, SIZE[0] // 16, SIZE[1] // 16)
    return values[:, 1:].transpose(1, 2).reshape(len(values), -1, 4, 4) if kind.startswith("Owl") else values


def explain(kind: str, inputs: dict[str, Any], **options: Any) -> gradcam.Explanation:
    return gradcam.explain(lively(kind), inputs, **options)


@pytest.mark.parametrize("edge", [None, "top"])
@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_autograd_by_hand(kind: str, edge: str | None) -> None:
    inputs = make_inputs(kind)
    # RfDetr itself mixes up the rows of windows that are not square.
    is_misplaced = pytest.warns(GradcamWarning, match="may be misplaced: the corners")
    with is_misplaced if kind == "RfDetr" else contextlib.nullcontext():
        explanation = explain(kind, inputs, target=Box([0, 1], edge))
    for k in range(2):
        expected = by_hand(kind, inputs, k, None if edge is None else 1)
        assert expected.any()
        scale = expected.max().item()
        assert torch.allclose(explanation.maps[:, k].double(), expected[:, 0], rtol=1e-6, atol=1e-6 * scale)


@gradcam.method("changed", summary="how far activations are from those of the first picture")
def changed(activations: Tensor) -> Tensor:
    return (activations - activations[:1]).norm(dim=1)


@pytest.mark.filterwarnings("ignore:The heatmap at layer")
@pytest.mark.parametrize("kind", KINDS)
def test_painted_square_is_where_it_was_painted(kind: str) -> None:
    """Check that most changes at the layer lie on the square, or within one cell of the coarsest grid."""
    # RfDetr itself mixes up the rows of windows that are not square.
    size = {"RfDetr": (256, 256)}.get(kind, (192, 256))
    y0, x0, side, around, least = (32, 0, 16, 0, 0.4) if kind.startswith("Owl") else (96, 32, 64, 32, 0.7)
    inputs = make_inputs(kind, size)
    inputs["pixel_values"] *= 0.1
    inputs["pixel_values"][1] = inputs["pixel_values"][0]
    inputs["pixel_values"][1, :, y0 : y0 + side, x0 : x0 + side] = 1
    energy = explain(kind, inputs, target=Box(0), method=changed).heatmaps[1, 0].double().square()
    square = energy[y0 - around : y0 + side + around, x0 - around : x0 + side + around]
    assert square.sum() > least * energy.sum()


@gradcam.method("reach", summary="how far the score depends on each place")
def reach(activations: Tensor, gradients: Tensor) -> Tensor:
    return gradients.abs().sum(2)


@pytest.mark.parametrize("kind", SAMPLING)
def test_box_lies_on_its_map(kind: str) -> None:
    """Check queries that sample a single point, with boxes centred there.

    With fresh weights, the boxes are the proposals. Without offsets, a query reads the features at the centre of its
    proposal. The two agree within one cell of the coarsest grid.
    """
    model = build(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sampling_offsets" in name:
                parameter.zero_()
            elif parameter.ndim > 1 and not any(part in name for part in ("norm", "bbox", "attention_weights")):
                parameter.normal_(0, 1.2 / parameter[0].numel() ** 0.5)
    inputs = make_inputs(kind, (192, 256))
    inputs["pixel_mask"] = torch.ones(2, 192, 256, dtype=torch.int64)
    if kind not in OF_CANVAS:
        inputs["pixel_mask"][1, 128:] = 0
        inputs["pixel_mask"][1, :, 160:] = 0
    find(model).set_threshold(0.0)
    explanation = gradcam.explain(model, inputs, target=Box([0, 1]), method=reach)
    assert explanation.instances is not None
    for heatmaps, instances in zip(explanation.heatmaps, explanation.instances):
        for heatmap, instance in zip(heatmaps, instances):
            assert instance.box is not None
            x0, y0, x1, y1 = instance.box
            down, across = divmod(int(heatmap.argmax()), heatmap.shape[1])
            assert abs(down - (y0 + y1) / 2) < 32
            assert abs(across - (x0 + x1) / 2) < 32


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("Owl")])
def test_boxes_of_padded_pictures(kind: str) -> None:
    """Use a second image of 40 x 64 pixels in a batch of 64 x 96."""
    model, inputs = lively(kind), make_inputs(kind)
    inputs["pixel_mask"] = torch.ones(2, *SIZE, dtype=torch.int64)
    inputs["pixel_mask"][1, 40:] = 0
    inputs["pixel_mask"][1, :, 64:] = 0
    sizes = [SIZE, SIZE if kind in OF_CANVAS else (40, 64)]
    assert_found(read(find(model, 0.0), inputs), by_transformers(kind, model(**inputs), sizes, 0.0))


@pytest.mark.parametrize("place", [(0, slice(8)), (slice(20, 40), slice(20, 40)), (slice(None), slice(None))])
def test_mask_of_another_form(place: Any) -> None:
    model, inputs = lively("Detr"), make_inputs("Detr")
    inputs["pixel_mask"] = torch.ones(2, *SIZE, dtype=torch.int64)
    inputs["pixel_mask"][1][place] = 0
    with pytest.raises(ImageError, match="not a rectangle in the upper left corner"):
        read(find(model), inputs)


@pytest.mark.parametrize("kind", ["Detr", "Yolos", "RTDetr", "Owlv2", "GroundingDino"])
def test_candidates_are_all_queries(kind: str) -> None:
    model, inputs = lively(kind), make_inputs(kind)
    family, batch = find(model, 0.99), to_batch(inputs)
    result = batch.run(family.wrap(model))
    logits = result.output.logits[0]
    if kind in GROUNDED:
        rated = torch.stack([logits[:, [1, 2]].sigmoid().amax(1), logits[:, 4].sigmoid()], 1)
    elif kind in ("Detr", "Yolos"):
        rated = (logits.exp() / logits.exp().sum(1, keepdim=True))[:, :-1]
    else:
        rated = 1 / (1 + (-logits).exp())
    label = 1 if kind in GROUNDED else 2
    best, of_one = (family.list_candidates(result, batch, choice)[0] for choice in (None, label))
    assert torch.allclose(best.scores, rated.max(1).values, rtol=1e-6)  # OWL computes its logits in float32
    assert torch.equal(best.labels, rated.max(1).indices)
    assert torch.allclose(of_one.scores, rated[:, label], rtol=1e-6)
    assert set(of_one.labels.tolist()) == {label}
    height, width = batch.size
    x0, y0, x1, y1 = best.boxes.unbind(1)
    centres = torch.stack([(x0 + x1) / 2 / width, (y0 + y1) / 2 / height], 1)
    sides = torch.stack([(x1 - x0) / width, (y1 - y0) / height], 1)
    assert torch.allclose(torch.cat([centres, sides], 1), result.output.pred_boxes[0], rtol=1e-9, atol=1e-12)


def test_phrases_end_at_full_stops_and_question_marks() -> None:
    model = lively("GroundingDino")
    texts = torch.tensor([[101, 20, 21, 1029, 22, 23, 24, 1012, 1012, 25, 26, 102]] * 2)
    family, batch = find(model, 0.0), to_batch({"pixel_values": torch.rand(2, 3, *SIZE), "input_ids": texts})
    result = batch.run(family.wrap(model))
    rated = result.output.logits[0].sigmoid()
    for label, places in enumerate([[1, 2], [4, 5, 6], [9, 10]]):
        expected = torch.stack([rated[:, place] for place in places]).amax(0)
        assert torch.equal(family.list_candidates(result, batch, label)[0].scores, expected)
    with pytest.raises(TargetError, match="There is no label 3: there are 3 phrases or queries in the text"):
        family.list_candidates(result, batch, 3)


def test_padding_is_no_phrase() -> None:
    """Give both images the second text, whose last three tokens are masked."""
    model = lively("GroundingDino")
    texts = {name: rows[[1, 1]] for name, rows in TEXTS.items()}
    family, batch = find(model), to_batch({"pixel_values": torch.rand(2, 3, *SIZE), **texts})
    with pytest.raises(TargetError, match="there are 1 phrases"):
        family.list_candidates(batch.run(family.wrap(model)), batch, 1)


def test_text_without_a_phrase() -> None:
    inputs = {"pixel_values": torch.rand(2, 3, *SIZE), "input_ids": torch.tensor([[101, 1012, 102]] * 2)}
    with pytest.raises(TargetError, match="The text contains no phrase"):
        read(find(lively("GroundingDino")), inputs)


def test_picture_without_such_a_phrase() -> None:
    """Use a second text with a single phrase."""
    model, inputs = lively("GroundingDino"), make_inputs("GroundingDino")
    family, batch = find(model), to_batch(inputs)
    first, second = family.list_candidates(batch.run(family.wrap(model)), batch, 1)
    assert first.scores.min() > 0
    assert second.scores.tolist() == [0] * QUERIES


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("Detr", "model.backbone"),
        ("TableTransformer", "model.backbone.conv_encoder"),
        ("DeformableDetr", "model.backbone"),
        ("RTDetr", "model.backbone"),
        ("Deimv2", "model.conv_encoder"),
        ("GroundingDino", "model.backbone.conv_encoder"),
        ("Yolos", "vit.encoder.layer.1.layernorm_before"),  # before the last attention
        ("OwlViT", "owlvit.vision_model.encoder.layers.1.layer_norm1"),
        ("Owlv2", "owlv2.vision_model.encoder.layers.1.layer_norm1"),
    ],
)
def test_layers(kind: str, layer: str) -> None:
    assert find(lively(kind)).layer == layer


def test_labels_and_inputs() -> None:
    model, pictures = lively("Detr"), torch.rand(2, 3, *SIZE)
    model.config.id2label = {0: "cat", 1: "dog", 2: "bird", 3: "cup", 4: "car"}
    assert find(model).labels == ["cat", "dog", "bird", "cup", "car"]
    assert find(lively("OwlViT")).labels is None
    assert find(model).to_inputs(pictures) == {"pixel_values": pictures}


def test_threshold_that_a_person_set() -> None:
    """Check that the threshold belongs to the model, for every reader; another model has its own threshold."""
    model = build("Detr")
    find(model).set_threshold(0.125)
    assert find(model).threshold == 0.125
    assert find(build("Detr")).threshold == 0.5


def save_tokenizer(folder: Path, *, is_bert: bool) -> None:
    """Write a tokenizer whose words are numbers: "w20" is token 20."""
    tokenizers = pytest.importorskip("tokenizers")
    bert_tokens, owl_tokens = (
        {101: "[CLS]", 102: "[SEP]", 1012: ".", 1029: "?", 0: "[PAD]"},
        {58: "<s>", 59: "</s>", 0: "!"},
    )
    special_tokens = bert_tokens if is_bert else owl_tokens
    words = {special_tokens.get(index, f"w{index}"): index for index in range(1100 if is_bert else 60)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    first, last = ("[CLS]", "[SEP]") if is_bert else ("<s>", "</s>")
    ends = [(first, words[first]), (last, words[last])]
    make_template = tokenizers.processors.TemplateProcessing
    tokenizer.post_processor = make_template(single=f"{first} $A {last}", special_tokens=ends)
    options = {"pad_token": special_tokens[0], "bos_token": first, "eos_token": last}
    T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)


def load(kind: str, folder: Path) -> nn.Module:
    lively(kind).save_pretrained(folder)
    save_tokenizer(folder, is_bert=kind in GROUNDED)
    return getattr(T, f"{kind}ForObjectDetection").from_pretrained(folder)


@pytest.mark.parametrize("kind", GROUNDED)
def test_phrases_become_one_text(kind: str, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    prompts = find(model).to_prompts(["W20 w21", " w22. "])
    assert prompts["input_ids"].tolist() == [[101, 20, 21, 1012, 22, 1012, 102]]
    actual = read(find(model), {"pixel_values": torch.rand(1, 3, *SIZE), **prompts})
    assert set(actual[0].labels.tolist()) <= {0, 1}
    with pytest.raises(TargetError, match="the model takes at most 16"):
        find(model).to_prompts(["w20 " * 15])


def test_queries_become_a_text_each(tmp_path: Path) -> None:
    model = load("OwlViT", tmp_path)
    prompts = find(model).to_prompts(["w3 w4", "w5"])
    assert prompts["input_ids"].tolist() == [[58, 3, 4, 59, 0, 0, 0, 0], [58, 5, 59, 0, 0, 0, 0, 0]]
    assert prompts["attention_mask"].sum(1).tolist() == [4, 3]
    output = model(pixel_values=torch.rand(1, 3, 64, 64), **prompts)
    assert output.logits.shape == (1, 16, 2)


@pytest.mark.parametrize("prompts", [["w20", " "], ["w20. w21"], ["w20?"]])
def test_phrases_that_are_none(prompts: list[str]) -> None:
    with pytest.raises(ModelError, match="each must be a word or phrase"):
        find(lively("GroundingDino")).to_prompts(prompts)


def test_prompts_without_a_tokenizer(tmp_path: Path) -> None:
    lively("OwlViT").save_pretrained(tmp_path)
    for model in (lively("OwlViT"), T.OwlViTForObjectDetection.from_pretrained(tmp_path)):
        with pytest.raises(ModelError, match="No tokenizer was found for the model"):
            find(model).to_prompts(["w3"])
    with pytest.raises(ModelError, match="takes no text prompts"):
        find(lively("Detr")).to_prompts(["w3"])


def test_model_that_gives_a_tuple() -> None:
    inputs = make_inputs("Detr") | {"return_dict": False}
    with pytest.raises(ModelError, match="return_dict=True"):
        read(find(lively("Detr")), inputs)


def test_arguments_by_their_place_in_a_model_that_has_it_inside() -> None:
    class Outer(nn.Module):
        """A module that takes images of twice the size."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = lively("Detr")

        def forward(self, pictures: Tensor, mask: Tensor) -> Any:
            return self.inner(pictures[:, :, ::2, ::2], mask)

    model, pictures = Outer(), torch.rand(2, 3, 2 * SIZE[0], 2 * SIZE[1])
    mask = torch.ones(2, *SIZE, dtype=torch.int64)
    mask[1, 40:] = 0
    explanation = gradcam.explain(model, (pictures, mask), target=Box(0))
    assert explanation.layer == "inner.model.backbone"
    assert explanation.instances is not None
    output = model.inner(pictures[:, :, ::2, ::2], mask)
    expected = by_transformers("Detr", output, [(128, 192), (80, 192)], None)
    boxes = torch.tensor([instance[0].box for instance in explanation.instances])
    assert torch.allclose(boxes, torch.stack([item["boxes"][0] for item in expected]), rtol=1e-9)
