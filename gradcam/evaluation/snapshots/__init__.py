"""What a model made of pictures, kept to be compared with another one: two checkpoints, precisions or quantisations."""
