"""What travels between processes and hosts, as values and as bytes; no I/O."""
