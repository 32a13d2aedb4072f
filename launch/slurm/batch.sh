# From here on the script is the same for every run (launch/slurm/batch.sh). It starts one launcher on each node, tells
# the processes when time is nearly up, and has depthbench.slurm.job decide what follows when they have ended.
attempt=$job.${SLURM_RESTART_COUNT:-0}
logs=$run_folder/slurm/logs/$attempt
trouble=$({ mkdir -p -- "$logs" && true >> "$logs/batch.log"; } 2>&1) || no_log "no log in $logs: $trouble"
exec >> "$logs/batch.log" 2>&1
fatal() {
    echo "depthbench: job $job: $*"
    exit 1
}
cd -- "$submission/code" # the code as it was at submission; Python looks here first
unset PYTHONSAFEPATH
time_is_up="" interrupted="" step="" asking="" leaving=""
ask_to_stop() { # again and again: a process that is still starting ignores the signal
    time_is_up=1
    if [ -z "$step" ] || [ -n "$asking" ]; then return; fi
    echo "attempt $attempt: asked to stop $(date +%T)"
    while :; do scancel --signal=USR1 "$job" && sleep 5 || sleep 1; done &
    asking=$!
}
leave_in_time() { # at the time limit: KillWait later Slurm kills this script with its processes, and requeues nothing
    interrupted=1
    if [ -z "$step" ] || [ -n "$leaving" ]; then return; fi
    (
        trap "" TERM USR1
        sleep $((kill_wait / 2))
        case $(scontrol show job --oneliner "$job") in *"=COMPLETING Reason=TimeLimit"*) kill -KILL "$step" ;; esac
    ) &
    leaving=$!
    disown "$leaving" # bash would say that it was killed
}
trap ask_to_stop USR1   # Slurm's warning before the time limit or a preemption
trap leave_in_time TERM # Slurm ends the job: the limit, a preemption, scancel
ask() ( # Slurm signals all that runs here, but a decision has to be written down
    trap "" TERM USR1
    exec "$host_python" -m depthbench.slurm.job "$@"
)

# no fallback: with another address than the others have, each node would wait or train alone
command -v scontrol > /dev/null || fatal "scontrol is not on PATH, so the head node cannot be found"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fatal "scontrol does not know the nodes $SLURM_JOB_NODELIST"
master_addr=${nodes%%$'\n'*}
[ -n "$master_addr" ] || fatal "scontrol names no node in $SLURM_JOB_NODELIST"
kill_wait=$(scontrol show config | grep KillWait) || kill_wait=30 # Slurm's default
kill_wait=${kill_wait//[!0-9]/} # seconds
master_port=$(ask port --job "$SLURM_JOB_ID" --restart "${SLURM_RESTART_COUNT:-0}")
echo "attempt $attempt: nodes $SLURM_JOB_NODELIST, ranks meet at $master_addr:$master_port"

code=0
ask begin --run-folder "$run_folder" --attempt "$attempt" --last-step "$last_step" --steps "$steps" \
    --max-requeues "$max_requeues" || code=$?
case $code in
0) ;;
10) exit 0 ;; # finished
*) exit "$code" ;;
esac

export DEPTHBENCH_ATTEMPT=$attempt # the processes write into the run folder only while this attempt owns it
export submission logs rank_python processes_per_node master_addr master_port
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # else srun forgets it
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "${srun_options[@]}" \
    "${inside[@]}" bash "$submission/node.sh" &
step=$!
[ -z "$time_is_up" ] || ask_to_stop
while :; do # a trap ends `wait`, not the step
    code=0
    wait "$step" || code=$?
    kill -0 "$step" 2> /dev/null || break
done
[ -z "$asking" ] || kill "$asking" 2> /dev/null || true
[ -z "$leaving" ] || kill -KILL "$leaving" 2> /dev/null || true

words=(--run-folder "$run_folder" --attempt "$attempt" --max-requeues "$max_requeues" --logs "$logs" --status "$code")
code=0
ask end "${words[@]}" ${interrupted:+--interrupted} || code=$?
[ "$code" = 11 ] || exit "$code"
until [ -n "$interrupted" ]; do sleep 1; done # Slurm ends this script now
