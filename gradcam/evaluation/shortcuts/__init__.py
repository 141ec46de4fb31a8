"""Find shortcuts, such as a watermark that only one class has, by clustering heatmaps and features."""
