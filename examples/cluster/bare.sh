#!/usr/bin/env bash
# One Ray cluster over machines that you can reach by ssh, one run on it, and nothing left afterwards.
#
#   examples/cluster/bare.sh recipe.toml HEAD [NODE ...]     run this on HEAD
#
# verst and the same Python environment are on every machine, under the same path; so are the model and the run folder,
# on a file system that all of them share. Engines and trainer ranks listen on the nodes' addresses without a password:
# a private network, please.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: $0 RECIPE HEAD [NODE ...]" >&2
    exit 2
fi
recipe=$1
head=$2
shift 2
port=${RAY_PORT:-6379}
ray=$(command -v ray)

# What goes over ssh is meant to be filled in here: everything lies under the same path everywhere.
# shellcheck disable=SC2029
stop() {
    for node in "$@"; do
        ssh "$node" "$ray stop" || true
    done
    "$ray" stop
}
trap 'stop "$@"' EXIT

"$ray" start --head --node-ip-address="$head" --port="$port" --include-dashboard=false --disable-usage-stats
for node in "$@"; do
    # shellcheck disable=SC2029
    ssh "$node" "$ray start --address=$head:$port --disable-usage-stats"
done
verst train "$recipe" "cluster.address=$head:$port"
