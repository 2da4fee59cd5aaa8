#!/usr/bin/env bash
# Sets up, then trains config_test with 2 ranks on this host, on a corpus that the project makes
# itself, so offline.
#
#   run_scripts/quickstart.sh
#   NP=4 run_scripts/quickstart.sh --num_epochs 2     4 ranks; arguments go to lm.train
#
# Cost: about a minute on 2 cores, plus the set-up (see setup.sh) the first time.
# Result: valid and test perplexity beside the corpus's true perplexity, on the console and in
#   runs/quickstart-<time>/; the exit status of the training.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --keep
source "$scripts/env.sh"
source run_scripts/mpirun_job.sh

run_job mpirun -np "${NP:-2}" "${mpirun_options[@]}" \
    python -m lm.train --config config_test \
    --output_dir "runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
