# shellcheck shell=bash disable=SC2154
# Sourced by setup.sh: compiled files are kept for other checkouts, in a directory named by a checksum of
# everything that they depend on. The cache may be deleted at any time.
cache=$(readlink -m "${XDG_CACHE_HOME:-${HOME:-}/.cache}/lm-compiled")

# Prints a file in directory $1, or a directory on the way to it, that another user can change. In a sticky
# directory such as /tmp, other users cannot replace this user's files.
changeable() {
    local path=$1 above=()
    while path=${path%/*} && [[ $path ]]; do above+=("$path"); done
    {
        find / "${above[@]}" -maxdepth 0 \( ! -uid "$EUID" ! -uid 0 -o -perm /022 ! -perm -1000 \)
        find "$1" \( ! -uid "$EUID" -o -perm /022 \)
    } 2>/dev/null | head -n 1
}

# Sets `kept` to the directory $1 of the cache. Its files are executed, so a directory in .venv replaces a
# cache that another user can change.
open_cache() {
    local changed
    kept=$cache/$1
    changed=$(changeable "$kept") || true
    [[ -n $changed ]] || return 0
    say "not using $cache: another user can change $changed (run chmod go-w, or set XDG_CACHE_HOME)"
    kept=$venv/compiled/$1
}

# Copies file $1 into directory $2. The rename is atomic, so no process ever sees an incomplete file.
put() {
    local new=$2/.new.$$
    (umask go-w && mkdir -p "$2" && cp "$1" "$new" && mv -f "$new" "$2/${1##*/}") && return
    rm -f "$new" 2>/dev/null
    return 1
}
