#!/bin/sh
# What a container of the image runs:
#
#   coordinator [OPTION...]   writes a run file from the environment, then `atoll coordinator`
#   node [OPTION...]          `atoll join` with the invite that the coordinator has written
#   anything else             that command
#
# Environment of the coordinator: METHOD MODEL NODES ROUNDS BATCH SOURCE SEED TRANSPORT (left out or empty: the
# default of `atoll run init`) and SETTINGS, further assignments SECTION.KEY=VALUE separated by spaces.
# Environment of a node: NODE_NAME RANKS THREADS DEVICE, and KEEP=yes for checkpoints in /var/lib/atoll.
set -eu

shared=${ATOLL_SHARED:-/run/atoll} # the coordinator writes there, nodes read
kept=/var/lib/atoll

[ -e "${NUMBA_CACHE_DIR:-/tmp/numba}" ] || cp -r /opt/atoll/numba "${NUMBA_CACHE_DIR:-/tmp/numba}"

case ${1:-} in
coordinator)
    shift
    file=/tmp/run.toml
    options=$*
    set -- --name "${RUN:-atoll}"
    [ -z "${METHOD:-}" ] || set -- "$@" --method "$METHOD"
    [ -z "${NODES:-}" ] || set -- "$@" --nodes "$NODES"
    [ -z "${ROUNDS:-}" ] || set -- "$@" --rounds "$ROUNDS"
    [ -z "${BATCH:-}" ] || set -- "$@" --batch "$BATCH"
    [ -z "${SOURCE:-}" ] || set -- "$@" --source "$SOURCE"
    [ -z "${SEED:-}" ] || set -- "$@" --set "run.seed=$SEED"
    [ -z "${MODEL:-}" ] || set -- "$@" --set "model.name=$MODEL"
    [ -z "${TRANSPORT:-}" ] || set -- "$@" --set "exchange.transport=$TRANSPORT"
    for setting in ${SETTINGS:-}; do set -- "$@" --set "$setting"; done
    atoll run init "$file" --force "$@" >/dev/null
    # Other values are another run: it gets a journal of its own, and nodes keep its checkpoints apart.
    run=$(python -c "import sys; from protos.runfile import RunFile; print(RunFile.load(sys.argv[1]).digest[:16])" "$file")
    rm -f "$shared/invite" # one left by a coordinator that was killed
    echo "$run" >"$shared/run"
    # shellcheck disable=SC2086 # options are words
    exec atoll coordinator "$file" --listen 0.0.0.0:4600 --advertise "${ADVERTISE:-coordinator}" \
        --journal "$kept/$run.journal" --invite-file "$shared/invite" $options
    ;;
node)
    shift
    set -- --nproc "${RANKS:-1}" --threads "${THREADS:-0}" --device "${DEVICE:-auto}" "$@"
    [ -z "${NODE_NAME:-}" ] || set -- --name "$NODE_NAME" "$@"
    if [ "${KEEP:-}" = yes ]; then
        folder=$kept/$(cat "$shared/run")
        set -- --save "$folder" --resume "$folder" "$@"
    fi
    exec atoll join "@$shared/invite" --wait "${WAIT:-10min}" "$@"
    ;;
*) exec "$@" ;;
esac
