from typing import final

from .lane import Lane
from .segment_table import SegmentTable

@final
class Receiver(Lane):
    def detach(self) -> None: ...
    def consider(self) -> None: ...
    @property
    def borrowed(self) -> SegmentTable: ...
