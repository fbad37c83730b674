"""`make test-arm64`: the extensions built for aarch64, and the tests run with them under emulation.

What runs is the aarch64 Python of the host's Debian release, with aarch64 wheels, in QEMU's user mode: each process of
a test is a process of the host, its instructions and system calls are translated, and the kernel is the host's.

    needs        what must be installed; every absence is an error that names the command which mends it
    sysroot      Python's packages for arm64, unpacked in build/arm64/root, and a virtual environment with the wheels
    emulator     runs a command for which aarch64 programs are executable, by namespaces and a registration of its own
    crossbuild   a copy of the source tree in build/arm64/tree, its extensions compiled by a cross compiler
    fingerprint  the same arithmetic on both architectures, compared bit by bit
    selection    the plugin of the emulated pytest: it leaves out what left_out.toml names, and keeps every outcome

Everything is written below build/arm64. The system is not changed: packages are fetched by an apt with folders of its
own and unpacked without being installed, and the emulator is registered in a user namespace that ends with the command.

What this cannot show: an x86 processor keeps the order of loads and stores that an arm64 processor may change, also
under emulation, so a missing barrier stays hidden here. The arm64 machines of the test workflow are there for that.
"""
