# shellcheck shell=bash
# Source this file to enter the project's root. All run scripts work in this directory. Relative paths in the
# variables below, and config files in arguments, keep referring to the user's directory. Other paths in
# arguments refer to the root.
unset CDPATH # otherwise cd may enter a different directory

for name in OUTPUT_DIR DATA_PATH HOSTFILE PTB_ARCHIVE CUDA_HOME DISCOVER_HOSTS PYTHON CXX CONFIG; do
    value=${!name:-}
    case $name in
        # A program name without a slash is searched for in PATH, and a config name in configs/.
        DISCOVER_HOSTS | PYTHON | CXX) [[ $value == */* ]] || continue ;;
        CONFIG) [[ $value == */* || $value == *.py ]] || continue ;;
    esac
    [[ -z $value || $value == /* ]] || printf -v "$name" %s "$PWD/$value"
done
arguments=()
for word in "$@"; do # mine.py or --config=mine.py
    value=${word#--config=}
    [[ $value != *.py || $value == /* || ! -e $value ]] || word=${word%"$value"}$PWD/$value
    arguments+=("$word")
done
set -- "${arguments[@]}"

cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
