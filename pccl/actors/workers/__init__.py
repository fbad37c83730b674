"""The processes that a peer actor forks: they move blocks of tensors, states and probes."""
