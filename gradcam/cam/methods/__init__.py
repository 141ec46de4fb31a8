"""The methods: a table of what there is, and pure functions from activations and gradients to maps."""
