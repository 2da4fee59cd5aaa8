#!/usr/bin/env bash
# Grid Engine on one machine: two hosts, sgehost1 and sgehost2, which are network namespaces.
#
#   sge.sh up DIR                  starts the daemons, which write to DIR
#   sge.sh run DIR COMMAND...      runs a command on sgehost1
#   sge.sh down DIR                ends the jobs and the daemons
#
# Needs root, iproute2, and the packages gridengine-master, gridengine-exec and gridengine-client.
set -euo pipefail
action=$1 dir=$2
export SGE_ROOT=$dir/root SGE_CELL=default SGE_QMASTER_PORT=6444 SGE_EXECD_PORT=6445

up() {
    down
    printf '127.0.0.1 localhost\n10.78.0.1 sgehost1\n10.78.0.2 sgehost2\n' >"$dir/hosts"
    for host in sgehost1 sgehost2; do
        ip netns add "$host"
        ip -n "$host" link set lo up
    done
    ip link add sgeveth1 netns sgehost1 type veth peer name sgeveth2 netns sgehost2
    for i in 1 2; do
        ip -n "sgehost$i" addr add "10.78.0.$i/24" dev "sgeveth$i"
        ip -n "sgehost$i" link set "sgeveth$i" up
    done
    in_host sgehost1 "$0" configure "$dir"
    in_host sgehost2 sge_execd
}

# Runs in sgehost1: creates a cell whose spool is in DIR, and starts the master and the first host.
configure() {
    mkdir -p "$SGE_ROOT/$SGE_CELL/common" "$dir"/spool/{db,qmaster,execd} "$dir"/tmp{1,2}
    chmod 755 "$dir"
    chmod 777 "$dir"/spool/{,db,qmaster,execd}
    ln -s /usr/share/gridengine/util /var/lib/gridengine/{bin,lib,utilbin} "$SGE_ROOT"
    echo sgehost1 >"$SGE_ROOT/$SGE_CELL/common/act_qmaster"
    sed "s|/var/spool/gridengine/spooldb|$dir/spool/db|; s|/var/spool/gridengine|$dir/spool|
        s|^admin_user.*|admin_user none|" \
        /var/lib/gridengine/default/common/bootstrap >"$SGE_ROOT/$SGE_CELL/common/bootstrap"
    # Root submits the jobs. The default configuration rejects jobs of users below 1000.
    sed "s|/var/spool/gridengine|$dir/spool|; s|^min_[ug]id.*1000|&0|; s|10000|0|" \
        /usr/share/gridengine/default-configuration >"$dir/configuration"
    /usr/lib/gridengine/spoolinit berkeleydb libspoolb "$dir/spool/db" init
    /usr/lib/gridengine/spooldefaults configuration "$dir/configuration"
    /usr/lib/gridengine/spooldefaults complexes /usr/share/gridengine/util/resources/centry
    /usr/lib/gridengine/spooldefaults usersets /usr/share/gridengine/util/resources/usersets
    /usr/lib/gridengine/spooldefaults managers root
    sge_qmaster
    until qconf -sh >/dev/null 2>&1; do sleep 0.1; done
    qconf -ah sgehost2
    qconf -as sgehost1,sgehost2
    printf '%s\n' "pe_name mpi" "slots 4" "user_lists NONE" "xuser_lists NONE" \
        "start_proc_args NONE" "stop_proc_args NONE" "allocation_rule 2" "control_slaves TRUE" \
        "job_is_first_task FALSE" "urgency_slots min" "accounting_summary FALSE" "qsort_args NONE" >"$dir/pe"
    qconf -Ap "$dir/pe"
    printf '%s\n' "group_name @allhosts" "hostlist sgehost1 sgehost2" >"$dir/group"
    qconf -Ahgrp "$dir/group"
    # Jobs start even if the machine is busy. Each host has its own directory for the files of jobs.
    qconf -sq | sed "s/^qname.*/qname all.q/; s/^hostlist.*/hostlist @allhosts/; s/^pe_list.*/pe_list mpi/
        s/^slots.*/slots 2/; s/^rerun.*/rerun TRUE/; s/^load_thresholds.*/load_thresholds NONE/
        s/^notify.*/notify 00:00:30/; s/^shell_start_mode.*/shell_start_mode unix_behavior/
        s|^tmpdir.*|tmpdir $dir/tmp1,[sgehost2=$dir/tmp2]|" >"$dir/queue"
    qconf -Aq "$dir/queue"
    sge_execd
}

in_host() { # HOST COMMAND...
    local host=$1
    shift
    ip netns exec "$host" unshare --uts --mount bash -c '
        hostname "$1"
        mount --bind "$0/hosts" /etc/hosts
        shift
        exec "$@"
    ' "$dir" "$host" "$@"
}

down() {
    for host in sgehost1 sgehost2; do
        ip netns pids "$host" 2>/dev/null | xargs -r kill -9 || true
        ip netns del "$host" 2>/dev/null || true
    done
}

case $action in
up) up ;;
configure) configure ;;
run) shift 2 && in_host sgehost1 "$@" ;;
down) down ;;
esac
