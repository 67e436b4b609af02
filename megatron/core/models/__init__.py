"""Models, and the parts they share."""
