"""Command lines that are no training runs."""
