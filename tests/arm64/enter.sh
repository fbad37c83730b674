#!/bin/sh
# enter.sh INTERPRETER COMMAND...: registers the interpreter for aarch64 executables, then becomes the command.
#
# To be started by unshare in a new user namespace and a new mount namespace. Since Linux 6.7 each user namespace may
# have a binfmt_misc of its own: nothing that is registered here is seen outside, and all of it ends with the command.
# P: the interpreter gets argument 0 as well. F: the kernel opens the interpreter now, whatever is mounted later.
set -eu
interpreter=$1
shift
registry=/proc/sys/fs/binfmt_misc
mount -t binfmt_misc binfmt_misc "$registry"
# The first 20 bytes of a 64-bit little-endian ELF file: executable or position independent, machine 183.
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf '%s' ":pccl-aarch64:M::$magic:$mask:$interpreter:PF" >"$registry/register"
exec "$@"
