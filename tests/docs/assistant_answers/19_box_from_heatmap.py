import gradcam


def find_box(model, image, target, region):
    heatmap = gradcam.explain(model, image[None], "features", target=target).heatmaps[0, 0]
    boxes = gradcam.find_boxes(heatmap, threshold=0.5)
    if not boxes:
        return None
    top, left, height, width = region
    across, down = width / heatmap.shape[1], height / heatmap.shape[0]
    box = boxes[0]
    return (left + box.left * across, top + box.top * down, left + box.right * across, top + box.bottom * down)
