#!/usr/bin/env bash
# Trains a config with NP ranks under horovodrun and Gloo: no MPI takes part.
#
#   run_scripts/train_horovodrun.sh
#   NP=2 HOSTS=host1:1,host2:1 run_scripts/train_horovodrun.sh
#
# Environment: NP (2), HOSTS (localhost:NP), CONFIG (config_small).
# SIGUSR1 does nothing: horovodrun does not pass it on, so there is no save between steps on demand.
# Cost: Gloo's exchange takes 2 to 4 times as long as MPI's. Result: a run in runs/.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --keep
source "$scripts/env.sh"
source run_scripts/mpirun_job.sh

# horovodrun loads TensorFlow itself, which would greet the user with five lines.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
np=${NP:-2}
stop_signal=TERM
run_job horovodrun --gloo -np "$np" -H "${HOSTS:-localhost:$np}" \
    python -m lm.train --config "${CONFIG:-config_small}" "$@"
