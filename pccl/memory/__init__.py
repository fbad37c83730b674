"""Shared segments, the arena and completion slots; no sockets and no protocol."""
