import gradcam


def to_grid(tokens):
    return tokens[:, 1:16].reshape(len(tokens), 3, 5, -1).permute(0, 3, 1, 2)


def explain(model, images, target):
    return explain_block(model, images, target, 1)


def explain_block(model, images, target, number):
    layer = f"blocks.{number}.attention_norm"
    return gradcam.explain(model, images, layer, target=target, reshape=to_grid).maps[:, 0]
