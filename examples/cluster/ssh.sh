#!/usr/bin/env bash
# A run over plain ssh: a master on the first host, a peer on every host, until all peers have ended.
#
#   examples/cluster/ssh.sh "10.0.0.1 ubuntu@10.0.0.2 ubuntu@10.0.0.3" python examples/diloco.py --steps 100
#
# The address of the master is added to the command as its last argument. A peer that fails is started again; one that
# ends with 0 is done. A program should call finish() at its end, and end with 0 on RunFinishedError: then a peer that
# died near the end does not wait alone for the others. Ctrl-C ends everything, on all hosts.
#
#   REMOTE_DIR     the folder on every host in which commands run; its .venv/bin comes first on the path  [pccl]
#   MASTER_PORT    where the master listens; peers take the first free port from 48149 up                 [48148]
#   RESTARTS       how often a peer is started again                                                      [100]
#   SSH            the command that reaches a host                                       [ssh -o BatchMode=yes]
set -euo pipefail
set -m # every job is a process group of its own, so that ending one ends what it has started

if [ $# -lt 2 ]; then
  sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

read -r -a hosts <<<"$1"
shift
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes}"
folder=$(printf '%q' "${REMOTE_DIR:-pccl}") # the shell of the other host reads it
folder=${folder/#\\~\//\~/}               # and replaces ~ there
port=${MASTER_PORT:-48148}
restarts=${RESTARTS:-100}
address="${hosts[0]#*@}:$port"
scratch=$(mktemp -d)
ended=$scratch/master # holds the exit code of the master, once it has ended
jobs=()

# Runs a command on a host. The terminal that ssh asks for is closed with the connection, and ends the command with it.
on() {
  local host=$1
  shift
  "${ssh[@]}" -tt "$host" "cd $folder && export PATH=\"\$PWD/.venv/bin:\$PATH\" && $(printf '%q ' "$@")" </dev/null
}

# The run's token, in a new file that only its owner can read: all users of a host can read command lines.
give_token() {
  "${ssh[@]}" "$1" "cd $folder && umask 077 && rm -f .pccl-token && cat >.pccl-token" <<<"$token"
}

# The master ends with 0 when all peers have called finish().
master() {
  local code=0
  on "${hosts[0]}" pccl run-master --listen "0.0.0.0:$port" --token-file .pccl-token --exit-when-finished || code=$?
  echo "$code" >"$ended"
}

peer() {
  local host=$1 attempt
  shift
  for ((attempt = 0; attempt <= restarts; attempt++)); do
    # shellcheck disable=SC2016 # the other host reads the file
    on "$host" bash -c 'PCCL_TOKEN=$(cat .pccl-token) exec "$@"' peer "$@" "$address" && return 0
    if [ -s "$ended" ]; then
      echo "ssh.sh: the peer on $host failed after the end of the master; not starting it again" >&2
      return "$(cat "$ended")"
    fi
    echo "ssh.sh: the peer on $host failed; starting it again" >&2
    sleep 2
  done
  return 1
}

end() {
  trap - EXIT INT TERM
  for job in "${jobs[@]}"; do kill -- "-$job" 2>/dev/null || true; done
  rm -rf "$scratch"
}
trap end EXIT
trap 'exit 130' INT TERM

token=$(head -c 32 /dev/urandom | base64 | tr -d '=\n')
for host in "${hosts[@]}"; do give_token "$host"; done
master &
jobs+=($!)
peers=()
for host in "${hosts[@]}"; do
  peer "$host" "$@" &
  peers+=($!)
  jobs+=($!)
done
status=0
for job in "${peers[@]}"; do wait "$job" || status=1; done
exit $status
