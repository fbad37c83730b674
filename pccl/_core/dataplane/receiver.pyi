from typing import final

from .lane import LaneEnd
from .segment_table import SegmentTable

@final
class Receiver(LaneEnd):
    def detach(self) -> None: ...
    def answer_notice(self) -> None: ...
    @property
    def borrowed(self) -> SegmentTable: ...
