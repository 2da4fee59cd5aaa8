#!/usr/bin/env bash
# Runs the long tests: 50 kill-and-resume rounds on 1 to 8 ranks, two hosts, Slurm, all variants of
# each fault, and 300 steps of each config on 1, 2, 4 and 8 ranks.
#
#   run_scripts/soak.sh
#   SOAK_ROUNDS=200 run_scripts/soak.sh -k many_times       arguments go to pytest
#
#   run_scripts/soak.sh -k "not 300_steps"                  without the longest
#
# Environment: SOAK_ROUNDS (50); SOAK_SEED, to repeat a failed soak (it prints its own); PTB_ARCHIVE,
#   without which the 300 steps are skipped.
# Cost: about half an hour on 2 cores, and two hours for the 300 steps. The tests on two hosts need
#   root, iproute2 and openssh-server, those of Slurm root, slurm-wlm, munge and libpmix-dev, those of
#   a search that several drivers share root and postgresql; they skip without.
# Result: exit status 0 if all pass.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --dev
# shellcheck source=run_scripts/env.sh
source "$scripts/env.sh"

python -m pytest -m soak -s "$@"
