#!/usr/bin/env bash
# Sets up with the test tools, then runs ruff and the tests.
#
#   run_scripts/test.sh                         everything except the tests marked soak
#   run_scripts/test.sh tests/unit -k batches   arguments go to pytest
#   run_scripts/test.sh -m soak -s              the long tests: 50 rounds of kill and resume, two hosts,
#       Slurm, all variants of each fault, an epoch of PTB, and 300 steps of each config
#       (-k "not 300_steps" skips these)
#
# Environment, with defaults in parentheses:
#   PTB_ARCHIVE   path of the PTB .tgz (if unset, some tests are skipped)
#   TMPDIR        directory for temporary files; must allow execution (/tmp)
#   SOAK_ROUNDS   rounds of kill and resume (50)
#   SOAK_SEED     seed of these rounds, to repeat a failed test, which prints its seed (random)
# Cost: 10 minutes on 2 cores, plus the setup the first time. The long tests take half an hour, and the 300
#   steps two hours. They need root, iproute2, openssh-server, slurm-wlm, munge and libpmix-dev.
# Result: exit code 0 if all tests pass.
set -euo pipefail
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
"$scripts/setup.sh" --dev
# shellcheck source=run_scripts/env.sh
source "$scripts/env.sh"
cd "$root"
# Only the owner of a shared installation can write to its directory.
[[ -w . ]] || export RUFF_NO_CACHE=1 PYTEST_ADDOPTS="-p no:cacheprovider" \
    HYPOTHESIS_STORAGE_DIRECTORY=${TMPDIR:-/tmp}/hypothesis-$EUID

ruff check .
ruff format --check .
# The whole suite runs one test module per core, because starting TensorFlow takes most of the time and uses
# one core. Directories with long modules come first, so that no core is idle at the end.
cores=$(python -c 'from lm.distributed.cores import claim_cores; print(claim_cores())')
(($#)) || set -- --numprocesses "$cores" --maxprocesses 8 --dist loadscope \
    --no-loadscope-reorder tests/{integration,faults,parallel,unit}
python -m pytest "$@"
