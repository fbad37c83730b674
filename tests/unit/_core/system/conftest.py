"""Fixtures of the tests in this folder."""

import mmap

import pytest


@pytest.fixture
def shared():
    with mmap.mmap(-1, 4096) as memory:
        yield memory
