"""The error of a peer's machine that hears what no honest master would say. Nothing else lives here."""


class ProtocolViolationError(Exception):
    """A message that does not fit: it ends the membership. From anybody but the master it is a bug of this process."""
