"""Memory files: sealed or not, and what a failed creation leaves behind."""

import fcntl
import os
import resource

import pytest

from pccl._core.system.mapping import create_memory_file


def test_memory_file_is_sealed():
    fd = create_memory_file("pccl-test", 4096)
    try:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        # A seal against writing cannot be added either.
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

        assert os.fstat(fd).st_size == 4096
        assert not os.get_inheritable(fd)
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:pccl-test")
    finally:
        os.close(fd)


def test_memory_file_without_seals_may_be_resized():
    fd = create_memory_file("pccl-test", 4096, seal=False)
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, -1])
def test_memory_file_of_no_size_is_refused(size):
    with pytest.raises(ValueError, match=str(size)):
        create_memory_file("pccl-test", size)


def test_failed_creation_leaks_no_descriptor():
    """A limit on the size of files makes the second step of the creation fail."""
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="giving the memory file 'pccl-test' its 4097 bytes"):
            create_memory_file("pccl-test", 4097)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert os.listdir("/proc/self/fd") == before


def test_name_that_is_too_long_for_the_kernel_is_an_error():
    with pytest.raises(OSError, match="creating the memory file"):
        create_memory_file("x" * 250, 4096)
