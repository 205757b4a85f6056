#!/usr/bin/env bash
# Run one hyper-parameter sweep by a chief and two workers on this machine.
#
#     examples/distributed_sweep.sh
#
# The chief hands out trials and prints the report; the workers train. On real
# machines give the chief's address and a shared folder, and start each line on
# its own host. Settings come from the environment, for example
# DATASET=wine TRIALS=4 STEPS=50 examples/distributed_sweep.sh
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
out=${OUT:-out/distributed_sweep}
flags=(
    --dataset="${DATASET:-digits}"
    --max_trials="${TRIALS:-6}"
    --steps="${STEPS:-200}"
    --samples="${SAMPLES:-100}"
    --radii="${RADII:-1:0.5,1}"
    --out="$out/sweep"
)
export KERASTUNER_ORACLE_IP=127.0.0.1
export KERASTUNER_ORACLE_PORT=${PORT:-23500}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
mkdir -p "$out"

workers=()
for name in worker0 worker1; do
    KERASTUNER_TUNER_ID=$name "$python" tools/tune.py "${flags[@]}" \
        >"$out/$name.log" 2>&1 &
    workers+=($!)
done
# No worker may outlive this script, however it ends.
trap 'kill "${workers[@]}" 2>/dev/null || true' EXIT

KERASTUNER_TUNER_ID=chief "$python" tools/tune.py "${flags[@]}"
wait "${workers[@]}"
echo "Logs of the workers: $out/worker0.log, $out/worker1.log"
