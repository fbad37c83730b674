"""Comparisons and measurements; nothing here is installed, and no test depends on a number from here."""
