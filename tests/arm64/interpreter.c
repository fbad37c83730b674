/* The emulator with its folder of libraries, as one program: what the kernel starts for an aarch64 executable.
 *
 * QEMU finds the libraries of emulated programs below the folder of its option -L or of an environment variable. The
 * kernel passes no options to an interpreter, and tests start children with an empty environment; so the folder is
 * compiled in here. EMULATOR and SYSROOT are defined by the compiler's command line.
 */

#include <stdio.h>
#include <unistd.h>

/* With flag P of binfmt_misc the arguments are: this program, the executable, its argument 0, the other arguments. */
enum { EXECUTABLE = 1, ARGUMENT_ZERO = 2, OTHERS = 3, ADDED = 3 };

int main(int count, char **arguments) {
    char *command[count + ADDED + 1];
    int length = 0;
    if (count < OTHERS) {
        fputs("this program is started by the kernel, for aarch64 executables\n", stderr);
        return 127;
    }
    command[length++] = EMULATOR;
    command[length++] = "-L";
    command[length++] = SYSROOT;
    command[length++] = "-0";
    command[length++] = arguments[ARGUMENT_ZERO];
    command[length++] = arguments[EXECUTABLE];
    for (int other = OTHERS; other < count; ++other) command[length++] = arguments[other];
    command[length] = NULL;
    execv(EMULATOR, command);
    perror(EMULATOR);
    return 127;
}
