"""Methods that follow a transformer's attention from the score back to the picture."""
