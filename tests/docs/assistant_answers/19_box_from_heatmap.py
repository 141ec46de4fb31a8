import cv2
import numpy as np

import gradcam


def find_box(model, image, target, region):
    heatmap = gradcam.explain(model, image[None], "features", target=target).heatmaps[0, 0].numpy()
    if heatmap.max() == 0:
        return None
    top, left, height, width = region
    heatmap = cv2.resize(heatmap, (width, height), interpolation=cv2.INTER_LINEAR)
    _, _, statistics, _ = cv2.connectedComponentsWithStats((heatmap >= heatmap.max() / 2).astype(np.uint8))
    x, y, width, height, _ = max(statistics[1:], key=lambda row: row[4])
    return left + x, top + y, left + x + width, top + y + height
