"""Find the class that supports a detector, segmenter, embedder, captioner or pose model in a table of families."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from gradcam.adapters.base import (
    CaptionerAdapter,
    DetectorAdapter,
    Embedder,
    Family,
    PoseAdapter,
    SegmenterAdapter,
    name_classes,
)
from gradcam.layers.model_names import BACKBONES, MODELING

Kind = TypeVar("Kind", bound=Family)
MAX_NESTING_DEPTH = 2  # Users wrap models, so this many levels of submodules are searched as well.


@dataclass(frozen=True)
class FamilyEntry:
    """A family of models: a pattern for the full names of model classes, and the `module:class` that supports them."""

    pattern: str
    family_class: str


DETECTORS = (
    "Detr|TableTransformer|Yolos|ConditionalDetr|DeformableDetr|DabDetr|LwDetr|RfDetr|RTDetr|RTDetrV2|DFine|Deimv2|"
    "OwlViT|Owlv2|GroundingDino|MMGroundingDino"
)
TOWERS = "CLIP|CLIPSeg|Siglip2?|AltCLIP|ChineseCLIP|MetaClip2|Align|VisionTextDualEncoder"

# If several rows match a model, the first one of the requested kind counts. A user's subclass of a listed class belongs
# to the family of the listed class.
FAMILIES = (
    FamilyEntry(
        r"torchvision\.models\.detection\.\w+\.(FasterRCNN|MaskRCNN|KeypointRCNN)",
        "torchvision_detection:RegionDetector",
    ),
    FamilyEntry(r"torchvision\.models\.detection\.\w+\.(RetinaNet|FCOS|SSD)", "torchvision_detection:AnchorDetector"),
    FamilyEntry(r"torchvision\.models\.detection\.\w+\.KeypointRCNN", "pose:KeypointRcnn"),
    FamilyEntry(
        r"torchvision\.models\.segmentation\.\w+\.(_SimpleSegmentationModel|LRASPP)",
        "segmentation:TorchvisionSegmenter",
    ),
    FamilyEntry(r"segmentation_models_pytorch\.base\.model\.SegmentationModel", "segmentation:EncoderSegmenter"),
    FamilyEntry(r"ultralytics\.nn\.tasks\.DetectionModel", "yolo:YoloDetector"),
    FamilyEntry(
        rf"{MODELING}(({DETECTORS})ForObjectDetection|DetrForSegmentation|RfDetrForInstanceSegmentation)",
        "huggingface_detection:HuggingFaceDetector",
    ),
    FamilyEntry(
        rf"{MODELING}(\w+ForSemanticSegmentation|CLIPSegForImageSegmentation)",
        "huggingface_segmentation:SemanticSegmenter",
    ),
    FamilyEntry(rf"{MODELING}\w+ForDepthEstimation", "huggingface_segmentation:DepthEstimator"),
    FamilyEntry(rf"{MODELING}Mask2FormerForUniversalSegmentation", "huggingface_segmentation:Mask2FormerSegmenter"),
    FamilyEntry(
        rf"{MODELING}(MaskFormerForInstance|OneFormerForUniversal)Segmentation",
        "huggingface_segmentation:QuerySegmenter",
    ),
    FamilyEntry(rf"{MODELING}Eomt\w*ForUniversalSegmentation", "huggingface_segmentation:EomtSegmenter"),
    FamilyEntry(rf"{MODELING}VisionEncoderDecoderModel", "captioning:EncoderDecoder"),
    FamilyEntry(rf"{MODELING}BlipForConditionalGeneration", "captioning:Blip"),
    FamilyEntry(rf"{MODELING}GitForCausalLM", "captioning:Git"),
    FamilyEntry(rf"{MODELING}(Blip2|InstructBlip)ForConditionalGeneration", "captioning:Blip2"),
    FamilyEntry(rf"{MODELING}(Llava|VipLlava|AyaVision|Gemma3)ForConditionalGeneration", "captioning:Llava"),
    FamilyEntry(rf"{MODELING}InternVLForConditionalGeneration", "captioning:InternVl"),
    FamilyEntry(rf"{MODELING}VitPoseForPoseEstimation", "pose:VitPose"),
    FamilyEntry(rf"{MODELING}({TOWERS})Model", "embedding:HuggingFaceTowers"),
    FamilyEntry(r"open_clip\.(model|coca_model)\.(CLIP|CustomTextCLIP|CoCa)", "embedding:OpenClipTowers"),
    FamilyEntry(BACKBONES, "embedding:Backbone"),
)


def find_family(model: nn.Module, kind: type[Kind]) -> Kind | None:
    """Return the family of this kind that supports the model or a submodule of it; None if there is none."""
    return next((family for family in list_families(model) if isinstance(family, kind)), None)


def find_main_family(model: nn.Module) -> Family | None:
    """Return the family for the model's main task; None if there is none, which usually means a classifier."""
    # A backbone inside a classifier may match the row of an embedder, but the model's task is classification.
    families = (family for family in list_families(model) if not (family.prefix and isinstance(family, Embedder)))
    return next(families, None)


def list_families(model: nn.Module) -> Iterator[Family]:
    """Yield the families that match the model or its submodules, outermost module first."""
    modules = [(name, module) for name, module in model.named_modules() if name.count(".") < MAX_NESTING_DEPTH]
    for name, module in sorted(modules, key=lambda item: item[0].count(".") + bool(item[0])):
        for family_class in find_family_classes(type(module)):
            yield family_class(module, name)


def find_family_classes(kind: type) -> Iterator[type[Family]]:
    """Yield the family classes that support this model class or one of its base classes."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    for entry in FAMILIES:
        if any(re.fullmatch(entry.pattern, name) for name in names):
            module_name, _, class_name = entry.family_class.partition(":")
            yield getattr(importlib.import_module(f"{__name__}.{module_name}"), class_name)


__all__ = [
    "FAMILIES",
    "CaptionerAdapter",
    "DetectorAdapter",
    "Embedder",
    "Family",
    "PoseAdapter",
    "SegmenterAdapter",
    "find_family",
    "find_main_family",
    "list_families",
    "name_classes",
]
