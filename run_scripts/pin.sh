#!/usr/bin/env bash
# Creates constraints/python<P>-tensorflow<T>.txt for each supported pair of Python and TensorFlow. The file
# pins every package that the setup installs, directly or indirectly, even on GPUs. With an unpinned package,
# a fresh checkout would break some day although its code has not changed.
#
#   run_scripts/pin.sh               after changing setup.py or constraints/requirements.in
#   run_scripts/pin.sh --upgrade     the newest versions; arguments go to uv
#
# Needs: uv (pip install uv), internet. Result: the files. Pinned versions stay if they still fit. To support
#   another pair, add it below, then test it (see CONTRIBUTING.md).
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/root.sh"

# The oldest and the newest TensorFlow for each Python.
pairs=(
    3.10:2.18.1 3.11:2.18.1 3.12:2.18.1
    3.10:2.21.0 3.11:2.21.0 3.12:2.21.0 3.13:2.21.0
)
for pair in "${pairs[@]}"; do
    python=${pair%:*} tensorflow=${pair#*:}
    # Horovod has no wheel. Without PyTorch, it does not need cffi.
    HOROVOD_WITHOUT_PYTORCH=1 uv pip compile --quiet --python-version "$python" --no-annotate \
        --custom-compile-command run_scripts/pin.sh \
        --constraint <(printf '%s\n' "tensorflow==$tensorflow" "tensorflow-cpu==$tensorflow") \
        --output-file "constraints/python$python-tensorflow$tensorflow.txt" \
        --extra dev --extra search --extra report setup.py constraints/requirements.in "$@"
done
