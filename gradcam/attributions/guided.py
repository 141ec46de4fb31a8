"""Guided backpropagation, and its product with Grad-CAM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gradcam.attributions.attribution import Attribution
from gradcam.attributions.differentiation import differentiable, with_classes
from gradcam.attributions.rectifiers import guided, require_all_guided
from gradcam.explanation import explain
from gradcam.nested import map_tensors


def guided_backpropagation(model: nn.Module, images: Any, *, target: Any = None) -> Attribution:
    """The gradient at the picture, of which every ReLU lets the positive part through alone.

    Springenberg et al. 2015, section 3.4. It shows fine detail, and hardly depends on the class: what it shows is what the
    network sees at all (Adebayo et al., "Sanity Checks for Saliency Maps", 2018). All zero is an answer.
    Hooks on the modules do it: `nn.ReLU` and `nn.ReLU6`, kinds of them, and `nn.Hardtanh` from 0 on, in place or
    not, however often one is used. Other nonlinearities keep their gradient.
    `images`, `target`: as in `gradcam.explain`, `input_gradients`.

    Raises `ModelError` where hooks do not reach a ReLU on the way from the picture to the score (F.relu, torch.relu,
    clamp(min=0) or clamp(0, 6), F.threshold at 0; `x * (x > 0)` and the like are not recognised), and where there is no
    ReLU at all; otherwise as `input_gradients` does.
    """
    with differentiable(model, images) as subject, guided(subject.modules) as outputs:
        run = subject.run(subject.pictures, target)
        if run.scores.requires_grad:
            require_all_guided(run.scores, run.entrance, outputs)
        return subject.attribution(run, subject.gradients(run), "guided-backprop")


def guided_gradcam(
    model: nn.Module, images: Any, layer: str | nn.Module | None = None, *, target: Any = None, reshape: Any = None
) -> Attribution:
    """Guided backpropagation, times the Grad-CAM heatmap in [0,1] at the picture's size: fine, and of the class.

    Selvaraju et al. 2017, section 3.2. `layer`, `reshape`: as in `gradcam.explain`, whose heatmap it is; `images`,
    `target`: as there.
    Raises as `gradcam.explain` and `guided_backpropagation` do.
    """
    fine = guided_backpropagation(model, images, target=target)
    copies = map_tensors(images, torch.Tensor.clone)  # the model may change its input in place
    coarse = explain(model, copies, layer, target=with_classes(target, fine.classes), reshape=reshape)
    values = fine.values * coarse.heatmaps[:, :, None]
    return replace(fine, values=values, method="guided-gradcam", layer=coarse.layer)
