"""The local page: pictures are dropped on it, and what needs the model is computed here and shown there."""
