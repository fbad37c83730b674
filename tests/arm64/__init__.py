"""`make test-arm64`: build the extensions for aarch64 and run the tests with them under emulation.

The tests run in the aarch64 Python of the host's Debian release, with aarch64 wheels, in QEMU's user mode: each process
of a test is a process of the host, its instructions and system calls are translated, and the kernel is the host's.

    needs        checks what must be installed; the error names the command that installs it
    sysroot      Python's packages for arm64, unpacked in build/arm64/root, and a virtual environment with the wheels
    emulator     runs a command that can execute aarch64 programs, in namespaces with a registration of their own
    crossbuild   a copy of the source tree in build/arm64/tree, its extensions compiled by a cross compiler
    fingerprint  the same arithmetic on both architectures, compared bit by bit
    selection    the plugin of the emulated pytest: skips the tests in left_out.toml, and records every outcome

Everything is written below build/arm64. The system is not changed: packages are fetched by an apt with folders of its
own and unpacked without being installed, and the emulator is registered in a user namespace that ends with the command.

Limit: an x86 processor keeps the order of loads and stores, also under emulation, and an arm64 processor may change
it. So a missing barrier is not found here; the arm64 machines of the test workflow are there for that.
"""
