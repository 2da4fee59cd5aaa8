#!/usr/bin/env bash
# Two hosts on one machine: network namespaces, each with its own host name and sshd.
#
#   two_hosts.sh up DIR      creates lmhost1 and lmhost2, and writes keys, logs and process IDs to DIR
#   two_hosts.sh run DIR HOST COMMAND...      runs a command in a host
#   two_hosts.sh cut|mend DIR                 unplugs or plugs in the network cable
#   two_hosts.sh down DIR                     stops and removes the hosts
#
# Needs root, iproute2 and openssh-server. As usual, PATH does not include .venv over ssh.
set -euo pipefail
action=$1 dir=$2
hosts=(lmhost1 lmhost2)

up() {
    mkdir -p /run/sshd
    ssh-keygen -q -t ed25519 -N '' -f "$dir/key"
    ssh-keygen -q -t ed25519 -N '' -f "$dir/host_key"
    printf '127.0.0.1 localhost\n10.77.0.1 lmhost1\n10.77.0.2 lmhost2\n' >"$dir/hosts"
    for host in "${hosts[@]}"; do
        ip netns add "$host"
        ip -n "$host" link set lo up
    done
    ip link add lmveth1 netns lmhost1 type veth peer name lmveth2 netns lmhost2
    for i in 1 2; do
        ip -n "lmhost$i" addr add "10.77.0.$i/24" dev "lmveth$i"
        ip -n "lmhost$i" link set "lmveth$i" up
        DIR=$dir HOST=lmhost$i setsid ip netns exec "lmhost$i" unshare --uts --mount bash -c '
            hostname "$HOST"
            mount --bind "$DIR/hosts" /etc/hosts
            echo $$ >"$DIR/$HOST.pid"
            exec /usr/sbin/sshd -D -f /dev/null -h "$DIR/host_key" -o PermitRootLogin=yes \
                -o AuthorizedKeysFile="$DIR/key.pub" -o StrictModes=no -o UsePAM=no \
                -o PidFile=none -E "$DIR/$HOST.log"
        ' </dev/null >/dev/null 2>&1 &
    done
    for host in "${hosts[@]}"; do
        until [[ -s $dir/$host.pid ]]; do
            sleep 0.1
        done
    done
    wait_for_ssh
}

wait_for_ssh() {
    local host
    for host in "${hosts[@]}"; do
        until in_host lmhost1 ssh -i "$dir/key" -o StrictHostKeyChecking=no \
            -o UserKnownHostsFile=/dev/null -o ConnectTimeout=2 "$host" true 2>/dev/null; do
            sleep 0.1
        done
    done
}

in_host() {
    local host=$1
    shift
    # nsenter changes to "/", where Python does not find lm.
    nsenter -t "$(<"$dir/$host.pid")" --net --uts --mount \
        bash -c 'cd "$0" && exec "$@"' "$PWD" "$@"
}

down() {
    for host in "${hosts[@]}"; do
        # Kill everything in the namespace.
        ip netns pids "$host" 2>/dev/null | xargs -r kill -9 || true
        ip netns del "$host" 2>/dev/null || true
    done
}

case $action in
up)
    down
    up
    ;;
run) shift 2 && in_host "$@" ;;
cut) ip -n lmhost2 link set lmveth2 down ;;
mend) ip -n lmhost2 link set lmveth2 up && wait_for_ssh ;; # the route returns with a delay
down) down ;;
esac
