"""HTML pages: templates, static files, and the interactive page of one image, which needs no server."""
