"""The check of one explanation: four tests, their thresholds, and the panel that shows them."""
