"""How a call ended, in numbers: what machines, wire and shared memory say, and `errors` turns into exceptions.

The numbers of `Result` that the machines use, without its enum, which would cost the actors their quick start; a test
holds the two together. A kind beside the result says what kind of end it was. A leaf: imports nothing.
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
KIND_CANCELLED = 3  # the caller itself gave the call up
KIND_COLLECTIVE = 4  # the result decides; ahead of the text are the numbers of the world
KIND_DESCRIBE = 5  # success so far: the caller is to describe its state, and then wait again


def join(result: int, kind: int) -> int:
    """Both in the one number that a completion slot has room for."""
    return result | kind << 8


def split(outcome: int) -> tuple[int, int]:
    """The inverse of `join`."""
    return outcome & 0xFF, outcome >> 8
