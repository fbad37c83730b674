from collections.abc import Callable
from typing import Any, Final, final

from pccl._core.protocol.messages import VoteTopology

from .admission import Admission
from .ballots import Ballots
from .membership import Membership, Peer
from .optimizer import Optimizer

VOTING: Final[str]
HELD: Final[str]
CLOSED: Final[str]
TRANSITIONS: Final[dict[tuple[str, type[Any]], tuple[Callable[..., str], tuple[str, ...]]]]

@final
class TopologyRound:
    def __init__(self, members: Membership, ballots: Ballots, optimizer: Optimizer, admission: Admission) -> None: ...
    @property
    def phase(self) -> str: ...
    @property
    def wanting(self) -> dict[int, tuple[int, int]]: ...
    def on_vote(self, peer: Peer, message: VoteTopology) -> None: ...
    def check(self) -> None: ...
