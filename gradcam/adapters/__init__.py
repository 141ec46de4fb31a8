"""Find the adapter class that supports a detector, segmenter, embedder, captioner or pose model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from gradcam.adapters.base import Embedder, Family
from gradcam.layers.model_names import BACKBONES, MODELING

Kind = TypeVar("Kind", bound=Family)
MAX_NESTING_DEPTH = 2  # Users may wrap models. Submodules are searched to this depth.

TORCHVISION = r"torchvision\.models\.(detection|segmentation)\.\w+\."
DETECTORS = (
    "Detr|TableTransformer|Yolos|ConditionalDetr|DeformableDetr|DabDetr|LwDetr|RfDetr|RTDetr|RTDetrV2|DFine|Deimv2|"
    "OwlViT|Owlv2|GroundingDino|MMGroundingDino"
)
OTHER_DETECTORS = "DetrForSegmentation|RfDetrForInstanceSegmentation"
TOWERS = "CLIP|CLIPSeg|Siglip2?|AltCLIP|ChineseCLIP|MetaClip2|Align|VisionTextDualEncoder"

# Maps a regular expression for the full name of a model class to its adapter, as "module:class". Subclasses of a model
# class also match. If several expressions match, the first adapter of the requested type is used.
FAMILIES = {
    rf"{TORCHVISION}(Faster|Mask|Keypoint)RCNN": "torchvision_detection:RegionDetector",
    rf"{TORCHVISION}(RetinaNet|FCOS|SSD)": "torchvision_detection:AnchorDetector",
    rf"{TORCHVISION}KeypointRCNN": "pose:KeypointRcnn",
    rf"{TORCHVISION}(_SimpleSegmentationModel|LRASPP)": "segmentation:TorchvisionSegmenter",
    r"segmentation_models_pytorch\.base\.model\.SegmentationModel": "segmentation:EncoderSegmenter",
    r"ultralytics\.nn\.tasks\.DetectionModel": "yolo:YoloDetector",
    rf"{MODELING}(({DETECTORS})ForObjectDetection|{OTHER_DETECTORS})": "huggingface_detection:HuggingFaceDetector",
    rf"{MODELING}(\w+ForSemantic|CLIPSegForImage)Segmentation": "huggingface_segmentation:SemanticSegmenter",
    rf"{MODELING}\w+ForDepthEstimation": "huggingface_segmentation:DepthEstimator",
    rf"{MODELING}Mask2FormerForUniversalSegmentation": "huggingface_segmentation:Mask2FormerSegmenter",
    rf"{MODELING}(MaskFormerForInstance|OneFormerForUniversal)Segmentation": "huggingface_segmentation:QuerySegmenter",
    rf"{MODELING}Eomt\w*ForUniversalSegmentation": "huggingface_segmentation:EomtSegmenter",
    rf"{MODELING}VisionEncoderDecoderModel": "captioning:EncoderDecoder",
    rf"{MODELING}BlipForConditionalGeneration": "captioning:Blip",
    rf"{MODELING}GitForCausalLM": "captioning:Git",
    rf"{MODELING}(Blip2|InstructBlip)ForConditionalGeneration": "captioning:Blip2",
    rf"{MODELING}(Llava|VipLlava|Gemma3|Mistral3)ForConditionalGeneration": "vision_language:VisionLanguageModel",
    rf"{MODELING}PaliGemmaForConditionalGeneration": "vision_language:PaliGemma",
    rf"{MODELING}(InternVL|AyaVision)ForConditionalGeneration": "vision_language:TiledModel",
    rf"{MODELING}Llama4ForConditionalGeneration": "vision_language:Llama4",
    rf"{MODELING}(Idefics3|SmolVLM)ForConditionalGeneration": "vision_language:Idefics",
    rf"{MODELING}Llava(Next|Onevision)ForConditionalGeneration": "vision_language:LlavaNext",
    rf"{MODELING}Qwen(2|2_5_|3)VLForConditionalGeneration": "vision_language:QwenVl",
    rf"{MODELING}Florence2ForConditionalGeneration": "vision_language:Florence",
    rf"{MODELING}Kosmos2ForConditionalGeneration": "vision_language:Kosmos",
    rf"{MODELING}VitPoseForPoseEstimation": "pose:VitPose",
    rf"{MODELING}({TOWERS})Model": "embedding:HuggingFaceTowers",
    r"open_clip\.(model|coca_model)\.(CLIP|CustomTextCLIP|CoCa)": "embedding:OpenClipTowers",
    BACKBONES: "embedding:Backbone",
}


def find_family(model: nn.Module, kind: type[Kind]) -> Kind | None:
    """Return an adapter of type `kind` for the model or a submodule; None if no adapter has this type."""
    return next((family for family in list_families(model) if isinstance(family, kind)), None)


def find_main_family(model: nn.Module) -> Family | None:
    """Return the adapter for the model's main task; None for models without an adapter, such as classifiers."""
    # Skip embedders of submodules. The submodule may be a backbone, and the model itself may be a classifier.
    families = (family for family in list_families(model) if not (family.prefix and isinstance(family, Embedder)))
    return next(families, None)


def list_families(model: nn.Module) -> Iterator[Family]:
    """Yield the adapters of the model and its submodules, starting with the outermost module."""
    modules = [(name, module) for name, module in model.named_modules() if name.count(".") < MAX_NESTING_DEPTH]
    for name, module in sorted(modules, key=lambda item: item[0].count(".") + bool(item[0])):
        for family_class in find_family_classes(type(module)):
            yield family_class(module, name)


def find_family_classes(kind: type) -> Iterator[type[Family]]:
    """Yield the adapter classes that support the model class `kind` or one of its base classes."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    for pattern, family_class in FAMILIES.items():
        if any(re.fullmatch(pattern, name) for name in names):
            module_name, _, class_name = family_class.partition(":")
            yield getattr(importlib.import_module(f"{__name__}.{module_name}"), class_name)
