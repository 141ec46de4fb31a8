"""The check of one explanation: five tests, their thresholds, and the panel that shows the results."""
