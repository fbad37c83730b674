"""The training process's side of a call: validation, posting to the peer actor, waiting, and the result."""
