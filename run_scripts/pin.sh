#!/usr/bin/env bash
# Makes constraints/python<P>-tensorflow<T>.txt for each pair of Python and TensorFlow that is
# supported: the version of every package that set-up installs, direct or not, also on GPUs. An
# unpinned one would one day break a fresh checkout whose code has not changed.
#
#   run_scripts/pin.sh               after a change of setup.py or constraints/requirements.in
#   run_scripts/pin.sh --upgrade     the newest versions; arguments go to uv
#
# Needs: uv (pip install uv), internet. No Python but the one of uv is used.
# Result: the files; a version that a file has and that still fits is kept. To support another
#   pair, add it below, then run the tests on it (run_scripts/test_pair.sh).
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/root.sh"

# Of each Python the oldest and the newest TensorFlow that Horovod builds with.
pairs=(
    3.9:2.18.1 3.10:2.18.1 3.11:2.18.1 3.12:2.18.1
    3.9:2.20.0 3.10:2.21.0 3.11:2.21.0 3.12:2.21.0 3.13:2.21.0
)

for pair in "${pairs[@]}"; do
    python=${pair%:*} tensorflow=${pair#*:}
    # Horovod has no wheel; without PyTorch it does not need cffi.
    HOROVOD_WITHOUT_PYTORCH=1 uv pip compile --quiet --python-version "$python" \
        --no-annotate \
        --custom-compile-command run_scripts/pin.sh \
        --constraint <(printf '%s\n' "tensorflow==$tensorflow" "tensorflow-cpu==$tensorflow") \
        --output-file "constraints/python$python-tensorflow$tensorflow.txt" \
        --extra dev setup.py constraints/requirements.in "$@"
done
