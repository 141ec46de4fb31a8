"""Small models of vit-pytorch with random weights."""

from __future__ import annotations

import importlib
from typing import Any

from sweep_cases import CLASSES, Case, make_noise
from torch import Tensor, nn

SIZE = 64
VIT_OPTIONS = {
    "image_size": SIZE,
    "patch_size": 8,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 64,
    "dim_head": 16,
}
VIDEO_OPTIONS = {
    "image_size": 32, "image_patch_size": 8, "frames": 8, "frame_patch_size": 2, "dim": 32, "depth": 2, "heads": 2,
    "mlp_dim": 64, "dim_head": 16,
}  # fmt: skip
VIT_ND_OPTIONS = {
    "ndim": 2,
    "input_shape": (48, 64),
    "patch_size": 8,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 64,
    "dim_head": 16,
}
VIVIT_OPTIONS = {
    **{name: value for name, value in VIDEO_OPTIONS.items() if name != "depth"},
    "spatial_depth": 1,
    "temporal_depth": 1,
}

# Module, class, options, size of the image.
MODELS: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
    ("vit", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("vit", "ViT", {**VIT_OPTIONS, "pool": "mean", "image_size": (48, 64)}, (48, 64)),
    ("simple_vit", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_with_register_tokens", "SimpleViT", {**VIT_OPTIONS, "num_register_tokens": 4}, (SIZE, SIZE)),
    ("simple_vit_with_hyper_connections", "SimpleViT", {**VIT_OPTIONS, "num_residual_streams": 2}, (SIZE, SIZE)),
    ("simple_vit_with_qk_norm", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_with_fft", "SimpleViT", {**VIT_OPTIONS, "freq_patch_size": 8}, (SIZE, SIZE)),
    ("simple_vit_with_patch_dropout", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_with_relative_proj_pos_bias", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_with_sparse_gating", "SimpleViTWithSparseGating", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_with_specialized_cls", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_with_value_residual", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_attn_residual", "SimpleViTAttnResidual", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_orthog_residual_update", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("attn_residual_with_dca_simple_vit", "SimpleViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_uvit", "SimpleUViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("simple_vit_3d", "SimpleViT", VIDEO_OPTIONS, (8, 32, 32)),
    ("vit_3d", "ViT", VIDEO_OPTIONS, (8, 32, 32)),
    ("vivit", "ViViT", {**VIVIT_OPTIONS, "use_flash_attn": False}, (8, 32, 32)),
    ("vivit", "ViViT", {**VIVIT_OPTIONS, "use_flash_attn": False, "variant": "factorized_self_attention"}, (8, 32, 32)),
    ("vivit_with_moss", "ViViT", {**VIVIT_OPTIONS, "use_flash_attn": False}, (8, 32, 32)),
    ("vit_nd_rotary", "ViTND", VIT_ND_OPTIONS, (48, 64)),
    ("vit_nd_pope", "ViTND", VIT_ND_OPTIONS, (48, 64)),
    ("vit_with_patch_merger", "ViT", {**VIT_OPTIONS, "patch_merge_layer": 1, "patch_merge_num_tokens": 8}, (SIZE, SIZE)),
    ("vit_with_patch_merger", "ViT", {**VIT_OPTIONS, "patch_merge_layer": 1, "patch_merge_num_tokens": 16}, (SIZE, SIZE)),
    ("vit_with_patch_dropout", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("vit_with_decorr", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("vit_with_keel_post_ln", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("vit_5", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("vit_detpool", "ViTDetPool", VIT_OPTIONS, (SIZE, SIZE)),
    ("vit_for_small_dataset", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("vat", "ViT", {**VIT_OPTIONS, "num_register_tokens": 4}, (SIZE, SIZE)),
    ("deepvit", "DeepViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("parallel_vit", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("learnable_memory_vit", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("ats_vit", "ViT", {**VIT_OPTIONS, "max_tokens_per_depth": (32, 16)}, (SIZE, SIZE)),
    ("jumbo_vit", "JumboViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("jet_vit", "JetViT", {**VIT_OPTIONS, "window_size": 4}, (SIZE, SIZE)),
    ("rvt", "RvT", VIT_OPTIONS, (SIZE, SIZE)),
    ("mp3", "ViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("normalized_vit", "nViT", VIT_OPTIONS, (SIZE, SIZE)),
    ("looped_vit", "LoopedViT", {"image_size": SIZE, "patch_size": 8, "dim": 32, "heads": 2, "mlp_dim": 64,
     "pre_loop_depth": 1, "num_looped_blocks": 1, "post_loop_depth": 1, "loop_depth": 2, "dim_head": 16}, (SIZE, SIZE)),
    ("wwt", "WWT", {"image_size": SIZE, "patch_size": 8, "dim": 32, "depth": 2, "num_slots": 4, "heads": 2, "dim_head": 16},
     (SIZE, SIZE)),
    ("cait", "CaiT", {**VIT_OPTIONS, "cls_depth": 1}, (SIZE, SIZE)),
    ("xcit", "XCiT", {**VIT_OPTIONS, "cls_depth": 1}, (SIZE, SIZE)),
    ("t2t", "T2TViT", {"image_size": SIZE, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64,
     "t2t_layers": ((7, 4), (3, 2))}, (SIZE, SIZE)),
    ("cct", "CCT", {"img_size": (48, 64), "embedding_dim": 32, "n_conv_layers": 2, "num_layers": 2, "num_heads": 2,
     "mlp_ratio": 2.0}, (48, 64)),
    ("cct_3d", "CCT", {"img_size": 32, "num_frames": 8, "embedding_dim": 32, "num_layers": 2, "num_heads": 2,
     "mlp_ratio": 2.0, "frame_kernel_size": 3}, (8, 32, 32)),
    ("cross_vit", "CrossViT", {"image_size": SIZE, "sm_dim": 16, "lg_dim": 32, "sm_patch_size": 8, "sm_enc_heads": 2,
     "sm_enc_mlp_dim": 32, "sm_enc_dim_head": 8, "lg_patch_size": 16, "lg_enc_depth": 1, "lg_enc_heads": 2,
     "lg_enc_mlp_dim": 32, "lg_enc_dim_head": 8, "cross_attn_depth": 1, "cross_attn_heads": 2,
     "cross_attn_dim_head": 8, "depth": 1}, (SIZE, SIZE)),
    ("pit", "PiT", {**VIT_OPTIONS, "depth": (1, 1)}, (SIZE, SIZE)),
    ("levit", "LeViT", {"image_size": 64, "dim": (32, 48), "depth": 1, "heads": (2, 2), "mlp_mult": 2, "stages": 2,
     "dim_key": 8, "dim_value": 16}, (SIZE, SIZE)),
    ("cvt", "CvT", {"s1_emb_dim": 16, "s1_heads": 1, "s1_depth": 1, "s2_emb_dim": 24, "s2_heads": 1, "s2_depth": 1,
     "s3_emb_dim": 32, "s3_heads": 2, "s3_depth": 1}, (SIZE, 96)),
    ("twins_svt", "TwinsSVT", {"s1_emb_dim": 16, "s1_patch_size": 4, "s1_local_patch_size": 4, "s1_global_k": 4,
     "s2_emb_dim": 24, "s2_patch_size": 2, "s2_local_patch_size": 4, "s2_global_k": 4, "s3_emb_dim": 32,
     "s3_patch_size": 2, "s3_local_patch_size": 4, "s3_global_k": 4, "s3_depth": 1, "s4_emb_dim": 32,
     "s4_patch_size": 1, "s4_local_patch_size": 4, "s4_global_k": 4, "s4_depth": 1}, (SIZE, SIZE)),
    ("max_vit", "MaxViT", {"dim": 16, "dim_conv_stem": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}, (SIZE, SIZE)),
    ("max_vit_with_registers", "MaxViT", {"dim": 16, "dim_conv_stem": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4},
     (SIZE, SIZE)),
    ("nest", "NesT", {"image_size": SIZE, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 3,
     "block_repeats": (1, 1, 1)}, (SIZE, SIZE)),
    ("mobile_vit", "MobileViT", {"image_size": (SIZE, SIZE), "dims": [16, 24, 32], "channels": [8, 8, 16, 16, 16, 16, 16,
     16, 24, 24, 32], "depths": (1, 1, 1)}, (SIZE, SIZE)),
    ("regionvit", "RegionViT", {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "window_size": 2}, (SIZE, SIZE)),
    ("crossformer", "CrossFormer", {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1),
     "global_window_size": (4, 2, 2, 1), "local_window_size": 2}, (SIZE, SIZE)),
    ("scalable_vit", "ScalableViT", {"dim": 16, "depth": (1, 1, 1, 1), "heads": (1, 1, 2, 2),
     "reduction_factor": (4, 2, 1, 1), "window_size": (4, 4, None, None), "iwsa_dim_key": 8, "iwsa_dim_value": 8,
     "ssa_dim_key": 8, "ssa_dim_value": 8}, (SIZE, SIZE)),
    ("sep_vit", "SepViT", {"dim": 16, "depth": (1, 1), "heads": (1, 2), "dim_head": 8}, (112, 112)),
    ("look_vit", "LookViT", {"dim": 32, "image_size": SIZE, "depth": 2, "patch_size": 16, "heads": 2, "dim_head": 16,
     "highres_patch_size": 8, "cross_attn_heads": 2, "cross_attn_dim_head": 16}, (SIZE, SIZE)),
]  # fmt: skip


class Listed(nn.Module):
    """Passes images as a list of lists, the input of NaViT."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model([list(images)])


def make_case(number: int, module: str, name: str, options: dict[str, Any], size: tuple[int, ...]) -> Case:
    """Return the case of one model."""

    def build() -> nn.Module:
        return getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(num_classes=CLASSES, **options)

    repetitions = sum(earlier[0] == module for earlier in MODELS[:number])
    return Case("vit_pytorch", f"{module}{f'-{repetitions + 1}' if repetitions else ''}", build, make_noise(*size))


def build_efficient() -> nn.Module:
    from vit_pytorch.efficient import ViT

    transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    return ViT(image_size=SIZE, patch_size=8, num_classes=CLASSES, dim=32, transformer=transformer, pool="mean")


def build_navit() -> nn.Module:
    from vit_pytorch.na_vit import NaViT

    return Listed(NaViT(num_classes=CLASSES, **VIT_OPTIONS))


CASES = [
    *(make_case(number, *model) for number, model in enumerate(MODELS)),
    Case("vit_pytorch", "efficient", build_efficient, make_noise(SIZE, SIZE)),
    Case("vit_pytorch", "na_vit", build_navit, make_noise(SIZE, SIZE)),
]
