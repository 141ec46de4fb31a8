"""Compare three methods."""

from pytorch_grad_cam import GradCAM, HiResCAM, LayerCAM


class MinusFirst:
    """The logit of a class minus the logit of class 0, of the output of one image."""

    def __init__(self, number):
        self.number = number

    def __call__(self, output):
        return output[self.number] - output[0]


def compare(model, images, classes):
    """Return {method: maps} for images (N,3,H,W) and a list of N classes."""
    targets = [MinusFirst(number) for number in classes]
    result = {}
    for name, method in {"gradcam": GradCAM, "hirescam": HiResCAM, "layercam": LayerCAM}.items():
        with method(model=model, target_layers=[model.features]) as cam:
            result[name] = cam(input_tensor=images, targets=targets)
    return result
