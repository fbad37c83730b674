"""The ring of blocks: plan, board, lanes, and what the lane workers run without the GIL."""
