"""How far maps can be trusted: `gradcam evaluate`, `gradcam check` and `gradcam recommend`, one file for each command."""
