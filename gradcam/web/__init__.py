"""Make HTML pages: templates, static files and their policy, and the interactive page of one image without a server."""
