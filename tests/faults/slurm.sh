#!/usr/bin/env bash
# A Slurm cluster on one machine: a controller and two nodes, n1 and n2, one daemon each.
#
#   slurm.sh up DIR             starts the daemons, which write to DIR
#   slurm.sh start DIR NODE     starts the daemon of a node again
#   slurm.sh down DIR           ends the jobs and the daemons
#
# With SLURM_CONF=DIR/slurm.conf, Slurm's commands use this cluster.
# Needs root, munge and slurm-wlm; srun --mpi=pmix also needs libpmix-dev.
set -euo pipefail
action=$1 dir=$2
export SLURM_CONF=$dir/slurm.conf

configure() {
    cat >"$SLURM_CONF" <<CONF
ClusterName=lm
SlurmctldHost=$(hostname)
SlurmctldPort=17000
SlurmUser=root
# A requeued job waits until credentials expire. The default is 120 s.
AuthInfo=socket=$dir/munge.socket,cred_expire=10
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdSpoolDir=$dir/spool-%n
# The PMIx server of a node and its ranks communicate here.
TmpFS=$dir/tmp-%n
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmdLogFile=$dir/slurmd-%n.log
# No control groups, because the machine may be a container. Tasks are bound to their cores.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# A node is up again as soon as its daemon is.
ReturnToService=2
NodeName=n1 NodeHostname=$(hostname) Port=17001 CPUs=2
NodeName=n2 NodeHostname=$(hostname) Port=17002 CPUs=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES State=UP GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
CONF
}

up() {
    mkdir "$dir"/{state,tmp-n1,tmp-n2}
    configure
    dd if=/dev/urandom of="$dir/munge.key" bs=1024 count=1 status=none
    chmod 400 "$dir/munge.key"
    # --force skips permission checks of the directory. Only root uses the socket.
    munged --force --socket "$dir/munge.socket" --key-file "$dir/munge.key" \
        --pid-file "$dir/munged.pid" --log-file "$dir/munged.log" --seed-file "$dir/munge.seed"
    slurmctld
    slurmd -N n1
    slurmd -N n2
    until [[ $(sinfo --noheader --states=idle --format=%D 2>/dev/null) == 2 ]]; do
        sleep 0.1
    done
}

down() {
    local pid_file pid
    # The daemons of job steps outlive slurmd.
    scancel --user=root || true
    for pid_file in "$dir"/{slurmd-n1,slurmd-n2,slurmctld,munged}.pid; do
        pid=$(cat "$pid_file" 2>/dev/null) && kill "$pid" || continue
        while [[ $(ps -o stat= -p "$pid") == [^Z]* ]]; do # a zombie is not running
            sleep 0.1
        done
    done
}

case $action in
up) up ;;
start) slurmd -N "$3" ;;
down) down ;;
esac
