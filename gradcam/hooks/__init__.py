"""Hooks that leave no trace, such as those that record a layer's output and the gradient there."""
