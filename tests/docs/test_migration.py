"""Test each row of the table for users of pytorch-grad-cam."""

from typing import Any

import numpy as np
import pytest
import torch
import torchvision

import gradcam
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/howto/from_pytorch_grad_cam.md").read_text(encoding="utf-8")


class TestMigration:
    """Each row of the table for users of pytorch-grad-cam."""

    model = torchvision.models.resnet18(weights=None).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    def test_every_row_is_covered(self) -> None:
        rows = [line for line in PAGE.splitlines() if line.startswith("|")][2:]
        assert len(rows) == 17  # add a test below when you add a row

    def test_constructor_and_call(self) -> None:
        explanation = gradcam.explain(self.model, self.images, self.model.layer4[-1])
        assert explanation.layer == "layer4.1"
        assert explanation.heatmaps[0, 0].numpy().shape == (64, 64)

    def test_targets(self) -> None:
        def maps(target: Any) -> torch.Tensor:
            return gradcam.explain(self.model, self.images, "layer4", target=target).maps

        top = self.model(self.images).argmax(1).tolist()
        assert torch.equal(maps(None), maps(top))
        assert torch.equal(maps(281), maps([281, 281]))
        torch.testing.assert_close(maps([[281, 282], [281, 282]])[:, 1:], maps(282))
        difference = gradcam.explain(self.model, self.images, "layer4", target=lambda x: x[:, 281] - x[:, 282])
        assert difference.scores[0, 0] == pytest.approx((difference.output[0, 281] - difference.output[0, 282]).item())
        with pytest.raises(gradcam.GradcamError):
            maps([281])  # pytorch-grad-cam silently returns a zero map for the second image

    def test_one_image_and_a_list_of_one(self) -> None:
        image = self.images[:1]
        assert torch.equal(
            gradcam.explain(self.model, image, "layer4", target=[281]).maps,
            gradcam.explain(self.model, image, "layer4", target=281).maps,
        )

    def test_several_layers_and_their_average(self) -> None:
        explained = gradcam.compare(self.model, self.images, layers=["layer3", "layer4"], methods=["gradcam"])
        average = torch.stack([explanation.heatmaps for explanation in explained.values()]).mean(0)
        single = gradcam.explain(self.model, self.images, "layer3").heatmaps
        torch.testing.assert_close(2 * average - explained["layer4", "gradcam"].heatmaps, single, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradcam.fuse(explained).maps, average)

    def test_their_classes_are_names_here(self) -> None:
        methods = ["gradcam-pp", "hirescam", "ablationcam"]
        explanations = gradcam.compare(self.model, self.images, layers=["layer4"], methods=methods, target=5)
        assert [method for _, method in explanations] == methods

    def test_smoothing(self) -> None:
        options = {"augmentation": "flip-scale", "smoothing": "eigen"}
        explanation, mirrored = (
            gradcam.explain(self.model, images, "layer4", target=5, **options)
            for images in (self.images, self.images.flip(-1))
        )
        torch.testing.assert_close(explanation.heatmaps, mirrored.heatmaps.flip(-1), rtol=1e-3, atol=1e-3)

    def test_guided_backpropagation_leaves_the_modules(self) -> None:
        before = list(self.model.modules())
        assert gradcam.attributions.guided_backpropagation(self.model, self.images).values.any()
        assert list(self.model.modules()) == before

    def test_their_reshape_transform_is_our_reshape(self) -> None:
        model = torchvision.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5
        ).eval()
        torch.nn.init.normal_(model.heads.head.weight)

        def reshape_transform(
            tensor: torch.Tensor, height: int = 4, width: int = 4
        ) -> torch.Tensor:  # copied from pytorch-grad-cam's documentation
            result = tensor[:, 1:, :].reshape(tensor.size(0), height, width, tensor.size(2))
            return result.transpose(2, 3).transpose(1, 2)

        layer, images = "encoder.layers.encoder_layer_1.ln_1", torch.randn(1, 3, 32, 32)
        explanation = gradcam.explain(model, images, layer, reshape=reshape_transform)
        assert torch.equal(explanation.maps, gradcam.explain(model, images, layer).maps)
        assert explanation.maps.any()

    def test_no_reshape_transform(self) -> None:
        swin = torchvision.models.swin_t(weights=None).eval()
        images = torch.randn(1, 3, 64, 64)
        last = gradcam.explain(swin, images, "features.7")  # channels last
        first = gradcam.explain(swin, images, "permute")  # the output of the later permutation, channels first
        assert last.maps.shape == first.maps.shape == (1, 1, 2, 2)

    def test_overlay(self) -> None:
        ramp = np.linspace(0, 1, 64, dtype=np.float32)[None].repeat(64, axis=0)
        images = [np.full((64, 64, 3), level, np.uint8) for level in (60, 120)]
        grey = [gradcam.overlay(image, ramp, base="color") for image in images]
        differences = grey[1].astype(int) - grey[0].astype(int)
        assert grey[0].dtype == np.uint8
        assert abs(differences[:, 0] - 60).max() <= 1  # no evidence: the unchanged image
        assert abs(differences[:, -1] - 30).max() <= 1  # half of the image shows through, at any brightness

    def test_normalisation_compared_with_theirs(self) -> None:
        from importlib.util import find_spec

        explanation_of_many = gradcam.explain(self.model, self.images, "layer4", target=[list(range(20))] * 2)
        # Untrained weights give many blank maps, so choose classes with evidence.
        classes = explanation_of_many.maps.flatten(2).amax(2).argmax(1).tolist()
        explanation = gradcam.explain(self.model, self.images, "layer4", target=classes)
        assert explanation.heatmaps.amax((2, 3)).unique().tolist() == [1.0]
        if find_spec("pytorch_grad_cam") is None:
            pytest.skip("pip install grad-cam to compare with it")
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        # Compare at the layer's size, because pytorch-grad-cam resizes with aligned corners.
        with GradCAM(model=self.model, target_layers=[self.model.layer4]) as cam:
            cam.get_target_width_height = lambda images: None
            peer_maps = cam(self.images, targets=[ClassifierOutputTarget(index) for index in classes])
        for heatmap, expected in zip(explanation.maps[:, 0], peer_maps):
            np.testing.assert_allclose((heatmap - heatmap.min()) / (heatmap.max() - heatmap.min()), expected, atol=1e-4)

    def test_the_model_is_left_as_it_was_and_its_output_is_kept(self) -> None:
        model = torchvision.models.resnet18(weights=None).train()
        explanation = gradcam.explain(model, self.images, "layer4")
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.testing.assert_close(explanation.output, model.eval()(self.images))
