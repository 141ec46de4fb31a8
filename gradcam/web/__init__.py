"""What browsers are shown: templates, static files and their policy, and the page of one picture, alive without a server."""
