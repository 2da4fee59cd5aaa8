# shellcheck shell=bash disable=SC2034
# Source this file to use .venv, whose mpirun Horovod was built with. It sets root and venv (see root.sh).
# shellcheck source=run_scripts/root.sh
source "$(dirname "${BASH_SOURCE[0]}")/root.sh"
[[ $PATH == "$venv/bin":* ]] || export PATH=$venv/bin:$PATH

script=${0##*/}
say() { echo "$*" >&2 || true; } # a log on a full disk must not end the script
fail() { say "${script%.*}: $*"; exit 2; } # for user mistakes

# Bash arithmetic would interpret a word as the name of a variable.
whole_number() { # NAME VALUE
    [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] || fail "$1 must be a whole number, not '$2'"
}

slots_of() { # host1:2,host2 -> 3
    local host total=0
    [[ $1, =~ ^([^:,[:space:]]+(:[1-9][0-9]*)?,)+$ ]] || fail "hosts must be like host1:1,host2:1, not '$1'"
    for host in ${1//,/ }; do
        [[ $host == *:* ]] && ((total += ${host##*:})) || ((total += 1))
    done
    echo "$total"
}
