"""The master's process: its actor, its state file, and the search for better rings."""
