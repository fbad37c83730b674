"""A cluster in virtual time: the real machines, a seeded network, seeded faults, and invariants after every event."""
