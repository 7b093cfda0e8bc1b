#!/bin/sh
# What a container of the image runs:
#
#   coordinator [OPTION...]   writes a run file from the environment, then `atoll coordinator`
#   node [OPTION...]          `atoll join` with the invite that the coordinator has written
#   link                      shapes the WAN's interface of a network that other containers join, and holds it
#   volunteer [OPTION...]     shapes its own interface, gives up the right to, and is a node
#   authority                 makes a certificate authority and what it has signed for coordinator and nodes, once
#   anything else             that command
#
# Environment of the coordinator: METHOD MODEL NODES ROUNDS BATCH SOURCE SEED TRANSPORT (left out or empty: the
# default of `atoll run init`) and SETTINGS, further assignments SECTION.KEY=VALUE separated by spaces.
# Environment of both: OPTIONS, further options of `atoll coordinator` and `atoll join`, separated by spaces.
# Environment of a node: NODE_NAME RANKS THREADS DEVICE, KEEP=yes for checkpoints in /var/lib/atoll, and WAN_SUBNET,
# where other nodes reach it.
# Environment of a link and a volunteer: WAN_SUBNET, and RATE DELAY LOSS of both ways; all empty: not shaped.
set -eu

shared=${ATOLL_SHARED:-/run/atoll} # the coordinator writes there, nodes read
kept=/var/lib/atoll

role=${1:-}
case $role in
link | volunteer) ;; # root, whose files a node could not write to
*) [ -e "${NUMBA_CACHE_DIR:-/tmp/numba}" ] || cp -r /opt/atoll/numba "${NUMBA_CACHE_DIR:-/tmp/numba}" ;;
esac

case $role in
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
        --journal "$kept/$run.journal" --invite-file "$shared/invite" $options ${OPTIONS:-}
    ;;
node)
    shift
    set -- --nproc "${RANKS:-1}" --threads "${THREADS:-0}" --device "${DEVICE:-auto}" "$@"
    [ -z "${NODE_NAME:-}" ] || set -- --name "$NODE_NAME" "$@"
    if [ "${KEEP:-}" = yes ]; then
        folder=$kept/$(cat "$shared/run")
        set -- --save "$folder" --resume "$folder" "$@"
    else
        export ATOLL_LOG_DIR="${ATOLL_LOG_DIR:-off}" # nothing that is written here outlives the container
    fi
    # libp2p would name the address in the site's own network.
    address=
    [ -z "${WAN_SUBNET:-}" ] || address=$(ip -4 -oneline address show to "$WAN_SUBNET" | sed 's|.*inet \([0-9.]*\).*|\1|')
    [ -z "$address" ] || set -- --swarm-listen "$address:0" "$@"
    # shellcheck disable=SC2086
    exec atoll join "@$shared/invite" --wait "${WAIT:-10min}" "$@" ${OPTIONS:-}
    ;;
link | volunteer)
    shift
    if [ -n "${RATE:-}${DELAY:-}${LOSS:-}" ]; then
        atoll throttle set --subnet "$WAN_SUBNET" --rate "${RATE:-}" --delay "${DELAY:-}" --loss "${LOSS:-}"
    fi
    # The shape is the network's, which ends with the container.
    [ "$role" = volunteer ] || { touch /tmp/shaped && exec sleep infinity; }
    export HOME=/tmp
    exec setpriv --reuid atoll --regid atoll --clear-groups atoll-container node "$@"
    ;;
authority) exec /usr/local/lib/atoll-authority "$kept" /run/tls/coordinator /run/tls/nodes ;;
*) exec "$@" ;;
esac
