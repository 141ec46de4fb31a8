"""Many pictures: where they are, the stages they go through, and what is written of them."""
