"""Compiled code: machines, protocol and loops over bytes; it knows nothing about users and processes."""
