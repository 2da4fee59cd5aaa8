#!/usr/bin/env bash
# Runs the long fault tests: 50 kill-and-resume rounds, two hosts, all variants of each fault.
#
#   run_scripts/soak.sh
#   SOAK_ROUNDS=200 run_scripts/soak.sh -k many_times       arguments go to pytest
#
# Environment: SOAK_ROUNDS (50); SOAK_SEED, to repeat a failed soak (it prints its own).
# Cost: about half an hour on 2 cores. The tests on two hosts need root, iproute2 and
#   openssh-server, and skip without them.
# Result: exit status 0 if all pass.
set -euo pipefail
scripts=$(dirname "${BASH_SOURCE[0]}")
"$scripts/setup.sh" --dev
# shellcheck source=run_scripts/env.sh
source "$scripts/env.sh"

python -m pytest tests/faults -m soak -s "$@"
