#!/usr/bin/env bash
# A Ray cluster in a Slurm allocation, one Ray node a machine, and one run on it.
#
#   RECIPE=recipe.toml sbatch examples/cluster/slurm.sh
#
# Killed by the time limit, the run goes on from its newest checkpoint when the same command is given again.
#SBATCH --job-name=verst
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail

: "${RECIPE:?the recipe to train: RECIPE=recipe.toml sbatch $0}"
port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
address=${address%% *}

srun --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" \
    --include-dashboard=false --disable-usage-stats --block &
if ((${#nodes[@]} > 1)); then
    # Nodes that come before the head wait for it.
    workers=$(IFS=,; echo "${nodes[*]:1}")
    srun --nodes=$((${#nodes[@]} - 1)) --ntasks-per-node=1 --nodelist="$workers" \
        ray start --address="$address:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats --block &
fi
until ray health-check --address "$address:$port" 2>/dev/null; do
    sleep 1
done

# The batch shell gets Slurm's signal, and hands it to the run, which then saves a checkpoint.
verst train "$RECIPE" "cluster.address=$address:$port" "cluster.wait_s=300" &
run=$!
trap 'kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
if kill -0 "$run" 2>/dev/null; then
    status=0
    wait "$run" || status=$?
fi
exit "$status"
