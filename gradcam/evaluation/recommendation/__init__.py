"""Which method, score and layer localise best on a person's own pictures."""
