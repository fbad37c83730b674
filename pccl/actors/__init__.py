"""I/O shells around the pure machines; what to do is decided in pccl._core, never here."""
