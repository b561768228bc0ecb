#!/bin/bash
# A Ray cluster for one SLURM job, and Rookery on it: sbatch slurm.sh
# The learner is in this script, on the first node; actors are spread over all nodes. Home and the working directory
# are on a file system that all nodes see. It is put into the queue again when its time is up, and goes on there.
#SBATCH --job-name=rookery
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=60G
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

RUN=${RUN:-runs/pong}
LEARNER_CORES=4 # of the first node; the others of it are for actors

umask 077
mkdir -p "$HOME/.ray"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/token-$SLURM_JOB_ID" RAY_USAGE_STATS_ENABLED=0
export RAY_health_check_period_ms=500 RAY_health_check_timeout_ms=1800 RAY_health_check_failure_threshold=2
openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH" # one token for this job; it is in no command line

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')
address=$ip:$((20000 + SLURM_JOB_ID % 10000)) # jobs that share nodes do not meet
workers=$((${#nodes[@]} - 1))
cpus=$((SLURM_CPUS_PER_TASK - LEARNER_CORES))

steps=()
# shellcheck disable=SC2329  # called by trap
end() {
    trap - EXIT
    kill "${steps[@]}" 2> /dev/null || true # these end Ray on their nodes
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap end EXIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    ray start --head --block --node-ip-address="$ip" --port="${address#*:}" --num-cpus="$cpus" \
    --include-dashboard=false &
steps+=($!)
for _ in $(seq 60); do
    if ray status --address "$address" > /dev/null 2>&1; then break; fi
    sleep 1
done
if ((workers > 0)); then
    srun --overlap --nodes="$workers" --ntasks="$workers" --exclude="${nodes[0]}" \
        ray start --block --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" &
    steps+=($!)
fi

# As many actors as there are CPUs. The run begins when `ray.least` of them can be placed; nodes may join later.
actors=$((cpus + workers * SLURM_CPUS_PER_TASK))
if [ -e "$RUN/config.json" ]; then
    rookery resume "$RUN" --ray.address "$address" --quiet &
else
    rookery train apex_dqn --env ALE/Pong-v5 --topology ray_cluster --ray.address "$address" --out "$RUN" --quiet \
        --actors "$actors" --envs-per-actor 1 --ray.least "$cpus" &
fi
learner=$!
trap 'kill -USR1 "$learner"' USR1 # the time is nearly up: a checkpoint, and exit code 75
trap 'kill -TERM "$learner"' TERM
code=0
wait "$learner" || code=$?
while kill -0 "$learner" 2> /dev/null; do # a signal has ended the wait, and not the learner
    code=0
    wait "$learner" || code=$?
done
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
