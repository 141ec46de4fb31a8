"""Hooks that leave no trace: record a layer's output, and the gradient there."""
