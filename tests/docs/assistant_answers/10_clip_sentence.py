import gradcam
from gradcam.targets import Text


def explain(folder, photo, sentences):
    matcher = gradcam.load_matcher(f"hf:{folder}")
    layer = "vision_model.encoder.layers.1.layer_norm1"
    explanation = matcher.explain(photo, layer, method="gradcam", target=Text(sentences))
    similarities = explanation.scores[0].tolist()
    best = similarities.index(max(similarities))
    return sentences[best], similarities, explanation.maps[0, best]
