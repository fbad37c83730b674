from typing import final

from .lane import Lane

@final
class Receiver(Lane):
    def detach(self) -> None: ...
