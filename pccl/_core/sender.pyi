from typing import final

from .lane import Lane

@final
class Sender(Lane):
    def attach(self, fd: int) -> None: ...
    def detach(self) -> None: ...
