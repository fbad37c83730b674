"""How a call ended, as numbers in machines, messages and completion slots; `errors` turns them into exceptions.

These are the numbers of `Result` that the machines use, without the enum, whose import would slow down the start of
the actors; a test compares the two. A kind beside the result says what kind of end it was. A leaf: imports nothing.
"""

SUCCESS = 0
INTERNAL_ERROR = 2
INVALID_ARGUMENT = 3
INVALID_USAGE = 4
TOO_FEW_PEERS = 5
MASTER_CONNECTION_FAILED = 6
RANK_CONNECTION_FAILED = 7
RANK_CONNECTION_LOST = 8
NO_SHARED_STATE_AVAILABLE = 9
PENDING_ASYNC_OPS = 10

KIND_PLAIN = 0  # the result alone decides
KIND_KICKED = 1  # the master ended this peer's membership and said why
KIND_MASTER_LOST = 2  # the connection to the master is gone
KIND_CANCELLED = 3  # the caller itself gave up the call
KIND_COLLECTIVE = 4  # the result decides; `events.NUMBERS` precede the text
KIND_DESCRIBE = 5  # success so far: the caller must write the manifest of its state, then wait again
KIND_FINISHED = 6  # the run is finished, and with it this membership


def join(result: int, kind: int) -> int:
    """Pack both into the one number of a completion slot."""
    return result | kind << 8


def split(outcome: int) -> tuple[int, int]:
    """The inverse of `join`."""
    return outcome & 0xFF, outcome >> 8
