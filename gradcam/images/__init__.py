"""Read, draw and write images."""
