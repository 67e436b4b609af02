"""Parts that every model shares."""
