#!/usr/bin/env bash
# Sets up, then trains config_test with 2 ranks on this host, on a generated corpus.
#
#   run_scripts/quickstart.sh
#   NP=4 run_scripts/quickstart.sh --num_epochs 2     4 ranks; arguments go to lm.train
#
# Cost: about a minute on 2 cores, plus the setup (see setup.sh) the first time.
# Result: the perplexities next to the corpus's true perplexity, on the console and in runs/quickstart-<time>/.
set -euo pipefail
export CUDA_VISIBLE_DEVICES= # the host may have one GPU for two ranks
export CONFIG=config_test
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/train.sh" \
    --output_dir "runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
