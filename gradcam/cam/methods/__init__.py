"""The table of CAM methods, and the functions that compute their maps."""
