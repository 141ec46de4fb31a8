import gradcam


def compare(model, images, classes):
    explained = gradcam.compare(
        model,
        images,
        layers=["features"],
        methods=["gradcam", "hirescam", "layercam"],
        target=lambda output: output[range(len(classes)), classes] - output[:, 0],
    )
    return {name: explanation.maps[:, 0] for (_, name), explanation in explained.items()}
