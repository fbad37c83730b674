"""Compiled code: machines, wire and loops over bytes; nothing here knows of users or of processes."""
