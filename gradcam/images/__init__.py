"""Pictures: read from any form, drawn on, and written whole."""
