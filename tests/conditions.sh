#!/usr/bin/env bash
# Run the tests under unusual conditions, in which they must pass too: one function for each condition. This file names
# no test and has no exceptions: a failure under a condition is fixed in the test or in the library.
#
#   tests/conditions.sh                        every condition, one after the other: `make test` in a fresh clone
#   tests/conditions.sh --list                 the conditions
#   tests/conditions.sh user+umask+tmpdir      three at once
#   tests/conditions.sh umask twice -- .venv/bin/python -m pytest -q tests/process/test_cli.py
#                                              another command, in this tree
#
# Exit status: 0 if every run passed, 1 if one failed, 2 for an unknown condition. A condition that this machine or this
# user cannot produce is reported as skipped, with the reason.
set -uo pipefail

self=$(readlink -f "$0")
tree=$(dirname "$(dirname "$self")")
# From the outermost to the innermost: conditions that need root come before the change of the user.
CONDITIONS=(twice no_ipv6 no_reaper late_reaper descriptors ignored_signals umask tmpdir user)
SKIPPED=77

skip() {
    echo "skipped: $1"
    return $SKIPPED
}

# --- Conditions: each runs a command ------------------------------------------

# Two runs at the same time: their ports, names and files must not collide.
twice() {
    local first second status=0
    (scratch=$scratch/1 && mkdir "$scratch" && export scratch && "$@") >"$scratch/first" 2>&1 &
    first=$!
    (scratch=$scratch/2 && mkdir "$scratch" && export scratch && "$@") >"$scratch/second" 2>&1 &
    second=$!
    for one in "$first" "$second"; do wait "$one" || status=1; done
    cat "$scratch/first" "$scratch/second"
    return $status
}

# A new network namespace, with loopback and without IPv6. Set-up downloads packages, so it runs in the original network
# namespace ($online).
no_ipv6() {
    [[ $EUID -eq 0 ]] || { skip "only root may switch IPv6 off"; return; }
    unshare --net true 2>/dev/null || { skip "there are no network namespaces"; return; }
    online="nsenter --net=/proc/$$/ns/net" unshare --net sh -c 'ip link set lo up && sysctl -qw net.ipv6.conf.all.disable_ipv6=1 && exec "$@"' sh "$@"
}

# Orphans get a parent that never waits for them, as in a container whose first process is no init.
no_reaper() {
    python3 -c 'import ctypes, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
sys.exit(subprocess.run(sys.argv[1:], check=False, close_fds=False).returncode)' "$@"
}

# Orphans get a parent that waits for them only every three seconds, as a busy init does: until then a process that has
# ended is a zombie, and its id is taken.
late_reaper() {
    python3 -c 'import ctypes, os, subprocess, sys, time
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
command = subprocess.Popen(sys.argv[1:], close_fds=False).pid
pid = 0
while pid != command:
    if pid == 0:
        time.sleep(3)
    pid, status = os.waitpid(-1, os.WNOHANG)
code = os.waitstatus_to_exitcode(status)
os._exit(code if code >= 0 else 128 - code)' "$@"
}

# Every new descriptor but two, which make closes for itself, has a number that is too large for select(). pytest's
# workers do not inherit descriptors, so their interpreter opens them again.
OPEN='import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
while os.open(os.devnull, os.O_RDONLY) < 2000:
    pass
for number in range(3, 2001):
    try:
        os.set_inheritable(number, True)
    except OSError:
        pass
os.execvp(sys.argv[1], sys.argv[1:])'
descriptors() {
    mkdir -p "$scratch" && chmod 755 "$scratch"
    {
        echo '#!/usr/bin/env bash'
        printf 'exec .venv/bin/python -c %q .venv/bin/python "$@"\n' "$OPEN"
    } >"$scratch/python" && chmod 755 "$scratch/python"
    PARALLEL="--dist load --tx $(($(nproc) + 2))*popen//python=$scratch/python" python3 -c "$OPEN" "$@"
}

# Ignored as in a background job (SIGINT, SIGQUIT) and under nohup (SIGHUP).
ignored_signals() (
    trap '' INT QUIT HUP
    "$@"
)

umask() (
    builtin umask 077
    "$@"
)

# Temporary files in a folder whose name has spaces and is longer than the address of a Unix socket may be.
tmpdir() {
    local folder
    folder="$scratch/$(printf 'else where %.0s' {1..12})"
    mkdir -p "$folder" && chmod 1777 "$folder" && TMPDIR=$folder "$@"
}

# An ordinary user, with the interpreter of the system, because this user cannot run one in root's home.
user() {
    [[ $EUID -eq 0 ]] || { "$@"; return; }
    command -v setpriv >/dev/null || { skip "there is no setpriv"; return; }
    local home=$scratch/home
    mkdir -p "$home" && chmod 755 "$scratch"
    printf '[safe]\n\tdirectory = *\n' >"$home/.gitconfig"  # so that git clones a tree that another user owns
    chown -R 65534:65534 "$home"
    # Nothing below a folder that only root may read can be used, so these variables avoid such folders.
    local as_user=(
        env "HOME=$home" "TMPDIR=${TMPDIR:-$home}" "PYTHON=${PYTHON:-/usr/bin/python3}"
        PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
        setpriv --reuid=65534 --regid=65534 --clear-groups --
    )
    # Only root may return to the original network namespace, so the set-up comes before the change of the user.
    if [[ -n ${online-} && $* == *--fresh-clone ]]; then
        make_clone && chown 65534:65534 "$clone" && $online "${as_user[@]}" "$self" --set-up "$clone" || return
    fi
    "${as_user[@]}" "$@"
}

# --- One after the other ------------------------------------------------------

# Apply the next condition to the rest of "a b -- command"; run the command if no condition is left.
inside() {
    local next=$1
    shift
    if [[ $next == -- ]]; then exec "$@"; else "$next" "$self" --inside "$@"; fi
}

# Make the folder of a fresh clone ($clone), which is removed when this shell ends.
make_clone() {
    clone=$(TMPDIR='' mktemp -d) && chmod 755 "$clone" || return
    export clone
    # shellcheck disable=SC2064  # the folder as it is now
    trap "rm -rf '$clone'" EXIT
}

# Clone the last commit into this folder, as the user that runs the tests, and install what `make test` needs.
set_up() {
    git clone --quiet "$tree" "$1/pccl" && cd "$1/pccl" && make setup
}

# Run `make test` in a fresh clone, which `user` may have set up.
fresh_clone() {
    if [[ -z ${clone-} ]]; then
        make_clone && time ${online-} "$self" --set-up "$clone" || return
    fi
    cd "$clone/pccl" && time make test
}

case ${1-} in
    --list) printf '%s\n' "${CONDITIONS[@]}"; exit 0 ;;
    --inside) shift; inside "$@"; exit ;;
    --fresh-clone) fresh_clone; exit ;;
    --set-up) set_up "$2"; exit ;;
esac

wanted=()
command=()
while (($#)); do
    if [[ $1 == -- ]]; then
        shift
        command=("$@")
        cd "$tree" || exit 2
        break
    fi
    wanted+=("$1")
    shift
done
((${#wanted[@]})) || wanted=("${CONDITIONS[@]}")
((${#command[@]})) || command=("$self" --fresh-clone)
for condition in ${wanted[*]//+/ }; do
    [[ " ${CONDITIONS[*]} " == *" $condition "* ]] || { echo "unknown condition: $condition" >&2; exit 2; }
done

scratch=$(mktemp -d)
chmod 755 "$scratch"  # so that `user` reaches its home also inside of `twice`
export scratch
trap 'rm -rf "$scratch"' EXIT
verdicts=()
failed=0
for combination in "${wanted[@]}"; do
    echo "== $combination"
    ordered=()
    for condition in "${CONDITIONS[@]}"; do
        [[ +$combination+ != *+$condition+* ]] || ordered+=("$condition")
    done
    rm -rf "${scratch:?}"/*
    "$self" --inside "${ordered[@]}" -- "${command[@]}"
    status=$?
    case $status in
        0) verdicts+=("$combination: passed") ;;
        "$SKIPPED") verdicts+=("$combination: skipped") ;;
        *) verdicts+=("$combination: FAILED"); failed=1 ;;
    esac
done
printf '%s\n' "" "${verdicts[@]}"
exit $failed
