"""Box and score are those of the detector's own output, and the map is gradient times activation of that score."""

import torch
from common import differentiate, expect_map, expect_unchanged, make_scene, record_state, run_check
from torchvision.models.detection import ssdlite320_mobilenet_v3_large


def check(answer):
    torch.manual_seed(1)
    detector = ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4, score_thresh=0.0, detections_per_img=20
    ).eval()
    image = make_scene(7, (120, 160))[0].sigmoid()
    with torch.no_grad():
        (detections,) = detector([image])
    before = record_state(detector)
    result = answer.explain(detector, image)
    expect_unchanged(before, detector)
    box = torch.as_tensor(result["box"]).float()
    assert box.shape == (4,), f"the box has the shape {tuple(box.shape)}"
    torch.testing.assert_close(box, detections["boxes"][1], rtol=1e-3, atol=0.05, msg="this is not the second box")
    assert abs(float(result["score"]) - float(detections["scores"][1])) < 1e-4, (
        "the score is not that of the second box"
    )
    layer = "backbone.features.0"
    activations, gradient, _ = differentiate(detector, layer, [[image]], lambda output: output[0]["scores"][1:2])
    expected = (activations * gradient).sum(1).relu()[0]
    received = torch.as_tensor(result["map"]).detach()
    assert received.shape == expected.shape, (
        f"the map has the shape {tuple(received.shape)}, not {tuple(expected.shape)}"
    )
    expect_map(received / received.max(), expected / expected.max())


if __name__ == "__main__":
    run_check(check)
