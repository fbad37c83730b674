"""Loops over numbers and bytes: arithmetic, quantization, checksums, digests; no I/O."""
