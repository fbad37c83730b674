"""Memory between guard pages: a read beyond its ends is always a segmentation fault."""

from __future__ import annotations

import ctypes
import mmap

PROT_NONE = 0


class GuardedBytes:
    """Memory pages that end with the content, between two guard pages that cannot be read."""

    def __init__(self, content: bytes) -> None:
        inner = -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pages = mmap.mmap(-1, inner + 2 * mmap.PAGESIZE)
        self._pages[mmap.PAGESIZE + inner - len(content) : mmap.PAGESIZE + inner] = content
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.begin, self.end = start + mmap.PAGESIZE, start + mmap.PAGESIZE + inner
        for page in (start, self.end):
            if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
