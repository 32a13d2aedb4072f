#!/usr/bin/env bash
# A real Slurm on this machine: munge, slurmctld and four slurmd, each a node of its own with two GPUs that are none.
#   bash tests/slurm/cluster.sh start FOLDER     installs what is missing (Debian or Ubuntu, as root) and starts it
#   bash tests/slurm/cluster.sh stop FOLDER      ends all that it started
# Afterwards `export SLURM_CONF=FOLDER/slurm.conf`. Starting again what runs does nothing.
set -euo pipefail
action=${1:?start or stop} folder=$(realpath -m -- "${2:?a folder}")
nodes=4 gpus=2 mark="# depthbench tests: nodes of one machine"
say() { echo "slurm: $*"; }
[ "$(id -u)" = 0 ] || { say "needs root" && exit 1; }
[[ $folder =~ ^[A-Za-z0-9/._-]+$ ]] || { say "$folder: slurm.conf takes plain paths only" && exit 1; }
export SLURM_CONF=$folder/slurm.conf

stop() {
    for file in "$folder"/run/*.pid; do
        [ -s "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2> /dev/null || true
        timeout 20 tail --pid="$pid" -f /dev/null || true # until it has ended
        rm -f "$file"
    done
    if grep -q "$mark" /etc/hosts; then # written over, not replaced: in a container it is a mount
        hosts=$(grep -v "$mark" /etc/hosts)
        printf '%s\n' "$hosts" > /etc/hosts
    fi
}

idle() { sinfo --noheader --Node --partition=local --format='%N %T' 2> /dev/null | grep -c ' idle$' || true; }

configure() {
    mkdir -p "$folder"/{state,spool,log,run,dev}
    for ((gpu = 0; gpu < gpus; gpu++)); do
        [ -e "$folder/dev/gpu$gpu" ] || mknod "$folder/dev/gpu$gpu" c 1 3 # /dev/null's numbers
    done
    host=$(hostname -s)
    # cred_expire: otherwise a requeued job waits two minutes
    cat > "$folder/slurm.conf" <<CONF
ClusterName=depthbench
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
MpiDefault=none
GresTypes=gpu
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=10
KillWait=16
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=3600
SlurmctldPort=16817
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd-%n.pid
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=dbnode[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-$((17000 + nodes))] CPUs=4 Boards=1 \
SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:$gpus State=UNKNOWN
PartitionName=local Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2
CONF
    echo "NodeName=dbnode[1-$nodes] Name=gpu File=$folder/dev/gpu[0-$((gpus - 1))] Flags=nvidia_gpu_env" > "$folder/gres.conf"
    # 22.05 fails with this line, later ones without it where cgroups are not mounted
    if slurmd -V | grep -qE ' (2[3-9]|[3-9][0-9])\.'; then echo "CgroupPlugin=disabled" > "$folder/cgroup.conf"; fi
}

start() {
    if [ -e "$SLURM_CONF" ] && [ "$(idle)" = $nodes ]; then return; fi
    missing=() # `command -v` of several is content with one
    for program in slurmctld slurmd sbatch munged; do command -v $program > /dev/null || missing+=($program); done
    if [ ${#missing[@]} -gt 0 ]; then
        say "installing ${missing[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client \
            munge > /dev/null
    fi
    stop
    configure
    names=$(printf ' dbnode%s' $(seq $nodes))
    echo "127.0.0.1$names $mark" >> /etc/hosts
    if ! munge -n > /dev/null 2>&1; then
        install -d -o munge -g munge -m 755 /run/munge
        su -s /bin/sh munge -c "/usr/sbin/munged"
        cp /run/munge/munged.pid "$folder/run/munged.pid"
    fi
    slurmctld -c -f "$SLURM_CONF" # -c: nothing of an earlier start
    for ((node = 1; node <= nodes; node++)); do slurmd -f "$SLURM_CONF" -N "dbnode$node"; done
    for ((tries = 0; tries < 300; tries++)); do
        if [ "$(idle)" = $nodes ]; then return; fi
        sleep 0.1
    done
    sinfo --Node --long || true
    tail -n 20 "$folder"/log/*.log
    exit 1
}

case $action in
start) start; say "$nodes nodes are idle: export SLURM_CONF=$SLURM_CONF" ;;
stop) stop; say "stopped" ;;
*) say "start or stop, not $action" && exit 1 ;;
esac
