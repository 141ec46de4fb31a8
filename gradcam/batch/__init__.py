"""Explain many images: the pipeline, the names of results, and the output formats."""
