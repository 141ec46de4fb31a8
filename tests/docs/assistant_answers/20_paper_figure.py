import matplotlib.pyplot as plt

import gradcam


def draw(photo, classes, path):
    explanation = gradcam.load_classifier().explain(photo, target=[classes])
    probabilities = [float(explanation.probability(k=k)) for k in range(len(classes))]
    image = gradcam.read_image(photo)
    figure, axes = plt.subplots(1, 1 + len(classes), figsize=(9, 3))
    axes[0].imshow(image)
    for k, name in enumerate(classes):
        axes[k + 1].imshow(explanation.overlay(k=k))
        axes[k + 1].set_title(f"{name} {probabilities[k]:.0%}")
    for axis in axes:
        axis.axis("off")
    figure.savefig(path, dpi=300)
    return probabilities
