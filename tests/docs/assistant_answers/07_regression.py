import gradcam


def explain(model, images, photos, folder):
    explanation = gradcam.explain(model, images, "0.features", evidence="signed")
    for i, photo in enumerate(photos):
        overlay = gradcam.overlay(photo, explanation.heatmaps[i, 0], signed=True, region=(0, 0, *photo.shape[:2]))
        gradcam.write_image(folder / f"house{i}.png", overlay)
    return explanation.output.reshape(-1), explanation.maps[:, 0]
