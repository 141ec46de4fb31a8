"""Where objects are: boxes, label masks and COCO files, in the network's own pixels."""
