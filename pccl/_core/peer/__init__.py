"""The peer's machine and its parts: events in, actions out; no I/O."""
