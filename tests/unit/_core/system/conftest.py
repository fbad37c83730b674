"""What the tests of this room share."""

import mmap

import pytest


@pytest.fixture
def shared():
    with mmap.mmap(-1, 4096) as memory:
        yield memory
