import gradcam


def explain(model, scan, path):
    classifier = gradcam.load_classifier(
        model, labels=["healthy", "fracture"], mean=0.5, std=0.25, size=64, crop=1, activation="sigmoid"
    )
    explanation = classifier.explain(scan, target="fracture")
    explanation.save(path)
    return float(explanation.probabilities()[0, 1])
