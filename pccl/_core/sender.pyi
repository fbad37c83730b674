from typing import final

from .lane import Lane

@final
class Sender(Lane):
    def serve(self) -> int: ...
