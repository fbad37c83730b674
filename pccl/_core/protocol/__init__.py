"""The messages between processes and between hosts, as values and as bytes; no I/O."""
