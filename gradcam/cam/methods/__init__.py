"""CAM methods: a table of them, and pure functions from activations and gradients to maps."""
