#!/usr/bin/env bash
# Runs the tests, or a part of them, under conditions in which they must pass as well: one function for each condition.
# Nothing here knows a test; what a condition breaks is mended in the test or in the library, never excused here.
#
#   tests/conditions.sh                                  every condition, all tests: hours
#   tests/conditions.sh --list                           the conditions
#   tests/conditions.sh umask twice -- tests/process/test_cli.py -x
#
# Exit status: 0 if every run passed, 1 if one failed, 2 for an unknown condition. A condition that this machine or this
# user cannot produce is reported as skipped, with the reason.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-.venv/bin/python}
[[ $python == /* ]] || python=$PWD/$python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

CONDITIONS=(user ignored_signals no_reaper descriptors umask no_ipv6 tmpdir twice)
SKIPPED=77

run() { "$python" -m pytest -q -p no:cacheprovider "${arguments[@]}"; }

skip() {
    echo "skipped: $1"
    return $SKIPPED
}

# An ordinary user in a tree that it may only read.
user() {
    [[ $EUID -eq 0 ]] || { run; return; }
    command -v setpriv >/dev/null || { skip "there is no setpriv"; return; }
    setpriv --reuid=65534 --regid=65534 --clear-groups -- \
        "$python" -c 'import subprocess, sys; subprocess.run([sys.executable, "-c", ""], check=True)' 2>/dev/null ||
        { skip "another user may not execute $python"; return; }
    mkdir "$scratch/home" && chmod 755 "$scratch" && chown 65534:65534 "$scratch/home"
    HOME=$scratch/home TMPDIR=$scratch/home HYPOTHESIS_STORAGE_DIRECTORY=$scratch/home/hypothesis \
        setpriv --reuid=65534 --regid=65534 --clear-groups -- "$python" -m pytest -q -p no:cacheprovider "${arguments[@]}"
}

# As a job in the background (SIGINT, SIGQUIT) and under nohup (SIGHUP).
ignored_signals() (
    trap '' INT QUIT HUP
    run
)

# Orphans go to a process that never waits for them, as in a container whose first process is no init.
no_reaper() {
    "$python" -c 'import ctypes, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)' \
        "$python" -m pytest -q -p no:cacheprovider "${arguments[@]}"
}

# Every new descriptor has a number above what select() can take. In one process: workers would not inherit them.
descriptors() {
    "$python" -c 'import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
for _ in range(2000):
    os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
os.execv(sys.argv[1], sys.argv[1:])' "$python" -m pytest -q -p no:cacheprovider "${arguments[@]}" -n 0
}

umask() (
    builtin umask 077
    run
)

# A network of its own, with loopback and without IPv6.
no_ipv6() {
    [[ $EUID -eq 0 ]] || { skip "a network namespace needs root"; return; }
    unshare --net true 2>/dev/null || { skip "there are no network namespaces"; return; }
    unshare --net sh -c 'ip link set lo up && sysctl -qw net.ipv6.conf.all.disable_ipv6=1 && exec "$@"' sh \
        "$python" -m pytest -q -p no:cacheprovider "${arguments[@]}"
}

# Temporary files in a folder with a space and a long name: longer than the address of a Unix socket may be.
tmpdir() (
    TMPDIR="$scratch/$(printf 'else where %.0s' {1..12})"
    mkdir -p "$TMPDIR"
    export TMPDIR
    run
)

# Two runs at the same time: ports, names and files must not meet.
twice() {
    local first second status=0
    run >"$scratch/first" 2>&1 &
    first=$!
    run >"$scratch/second" 2>&1 &
    second=$!
    for one in "$first" "$second"; do wait "$one" || status=1; done
    cat "$scratch/first" "$scratch/second"
    return $status
}

wanted=()
arguments=()
while (($#)); do
    case $1 in
        --list) printf '%s\n' "${CONDITIONS[@]}"; exit 0 ;;
        --) shift; arguments=("$@"); break ;;
        *) wanted+=("$1") ;;
    esac
    shift
done
((${#wanted[@]})) || wanted=("${CONDITIONS[@]}")
((${#arguments[@]})) || arguments=(-n "$(($(nproc) + 2))" --dist loadgroup)
for condition in "${wanted[@]}"; do
    [[ " ${CONDITIONS[*]} " == *" $condition "* ]] || { echo "unknown condition: $condition" >&2; exit 2; }
done

verdicts=()
failed=0
for condition in "${wanted[@]}"; do
    echo "== $condition"
    "$condition"
    status=$?
    case $status in
        0) verdicts+=("$condition: passed") ;;
        "$SKIPPED") verdicts+=("$condition: skipped") ;;
        *) verdicts+=("$condition: FAILED"); failed=1 ;;
    esac
done
printf '%s\n' "" "${verdicts[@]}"
exit $failed
