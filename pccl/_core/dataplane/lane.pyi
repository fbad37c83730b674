from typing import Final, Self

from .board import Board
from .segment_table import SegmentTable

LANE_MAIL: Final[int]
LANE_ENDED: Final[int]
LANE_UNMAPPED: Final[int]
LANE_FAULT: Final[int]
LANE_HOST_FRAME: Final[int]

class LaneEnd:
    frames_until_fault: int
    @property
    def board(self) -> Board: ...
    @property
    def segments(self) -> SegmentTable: ...
    @property
    def wanted(self) -> int: ...
    @property
    def problem(self) -> str: ...
    def __new__(cls, board: Board, lane: int, sends: bool, mailbox: int, bell: int) -> Self: ...
    def attach(self, fd: int, *, whereabouts: bytes = b"", host_read: bool = False) -> None: ...
    def detach(self) -> None: ...
