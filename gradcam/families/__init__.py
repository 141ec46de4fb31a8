"""How families of models that do more than classify are run and read: one row of a table, and one file, for each."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from gradcam.families.base import Captioner, Detector, Embedder, Family, PoseFinder, Segmenter, name_classes

Kind = TypeVar("Kind", bound=Family)
DEEPEST = 2  # levels below a model at which the one that it wraps is looked for


@dataclass(frozen=True)
class Row:
    """Models whose class is called so, by its full name, and `module:class` of what reads them, in this package."""

    pattern: str
    reader: str


MODELING = r"transformers\.models\.\w+\.modeling_\w+\."
DETECTORS = (
    "Detr|TableTransformer|Yolos|ConditionalDetr|DeformableDetr|DabDetr|LwDetr|RfDetr|RTDetr|RTDetrV2|DFine|Deimv2|"
    "OwlViT|Owlv2|GroundingDino|MMGroundingDino"
)
TOWERS = "CLIP|CLIPSeg|Siglip2?|AltCLIP|ChineseCLIP|MetaClip2|Align|VisionTextDualEncoder"
BACKBONES = rf"{MODELING}(?!\w*PreTrained|VisionEncoderDecoder)\w*(Model|ModelWithProjection|Backbone)"

# In the order in which they are tried; a class of a user's own that extends one of these is read as that.
FAMILIES = (
    Row(
        r"torchvision\.models\.detection\.\w+\.(FasterRCNN|MaskRCNN|KeypointRCNN)",
        "torchvision_detection:RegionDetector",
    ),
    Row(r"torchvision\.models\.detection\.\w+\.(RetinaNet|FCOS|SSD)", "torchvision_detection:AnchorDetector"),
    Row(r"torchvision\.models\.detection\.\w+\.KeypointRCNN", "pose:KeypointRcnn"),
    Row(
        r"torchvision\.models\.segmentation\.\w+\.(_SimpleSegmentationModel|LRASPP)",
        "segmentation:TorchvisionSegmenter",
    ),
    Row(r"segmentation_models_pytorch\.base\.model\.SegmentationModel", "segmentation:EncoderSegmenter"),
    Row(r"ultralytics\.nn\.tasks\.DetectionModel", "yolo:YoloDetector"),
    Row(
        rf"{MODELING}(({DETECTORS})ForObjectDetection|DetrForSegmentation|RfDetrForInstanceSegmentation)",
        "huggingface_detection:HuggingFaceDetector",
    ),
    Row(
        rf"{MODELING}(\w+ForSemanticSegmentation|CLIPSegForImageSegmentation)",
        "huggingface_segmentation:SemanticSegmenter",
    ),
    Row(rf"{MODELING}\w+ForDepthEstimation", "huggingface_segmentation:DepthEstimator"),
    Row(rf"{MODELING}Mask2FormerForUniversalSegmentation", "huggingface_segmentation:Mask2FormerSegmenter"),
    Row(
        rf"{MODELING}(MaskFormerForInstance|OneFormerForUniversal)Segmentation",
        "huggingface_segmentation:QuerySegmenter",
    ),
    Row(rf"{MODELING}Eomt\w*ForUniversalSegmentation", "huggingface_segmentation:EomtSegmenter"),
    Row(rf"{MODELING}VisionEncoderDecoderModel", "captioning:EncoderDecoder"),
    Row(rf"{MODELING}BlipForConditionalGeneration", "captioning:Blip"),
    Row(rf"{MODELING}GitForCausalLM", "captioning:Git"),
    Row(rf"{MODELING}(Blip2|InstructBlip)ForConditionalGeneration", "captioning:Blip2"),
    Row(rf"{MODELING}(Llava|VipLlava|AyaVision|Gemma3)ForConditionalGeneration", "captioning:Llava"),
    Row(rf"{MODELING}InternVLForConditionalGeneration", "captioning:InternVl"),
    Row(rf"{MODELING}VitPoseForPoseEstimation", "pose:VitPose"),
    Row(rf"{MODELING}({TOWERS})Model", "embedding:HuggingFaceTowers"),
    Row(r"open_clip\.(model|coca_model)\.(CLIP|CustomTextCLIP|CoCa)", "embedding:OpenClipTowers"),
    Row(BACKBONES, "embedding:Backbone"),
)


def find_family(model: nn.Module, kind: type[Kind]) -> Kind | None:
    """What reads the model, or the one inside it; None for a model of no known family of that kind."""
    return next((found for found in list_families(model) if isinstance(found, kind)), None)


def find_main(model: nn.Module) -> Family | None:
    """What reads a model for what it is there for; None for one of no known family, which classifies as a rule."""
    # Inside of a classifier there may be something that gives features.
    found = (it for it in list_families(model) if not (it.prefix and isinstance(it, Embedder)))
    return next(found, None)


def list_families(model: nn.Module) -> Iterator[Family]:
    """All that reads a model, or models up to `DEEPEST` levels inside it, the outermost first."""
    inside = [(name, each) for name, each in model.named_modules() if name.count(".") < DEEPEST]
    for name, each in sorted(inside, key=lambda it: it[0].count(".") + bool(it[0])):
        for reader in find_readers(type(each)):
            yield reader(each, name)


def find_readers(kind: type) -> Iterator[type[Family]]:
    """What reads models of this class, or of one that it extends."""
    names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
    for row in FAMILIES:
        if any(re.fullmatch(row.pattern, name) for name in names):
            place, _, reader = row.reader.partition(":")
            yield getattr(importlib.import_module(f"{__name__}.{place}"), reader)


__all__ = [
    "BACKBONES",
    "FAMILIES",
    "MODELING",
    "Captioner",
    "Detector",
    "Embedder",
    "Family",
    "PoseFinder",
    "Segmenter",
    "find_family",
    "find_main",
    "list_families",
    "name_classes",
]
