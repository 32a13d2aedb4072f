# What the one task of a node does: start torchrun, which starts a process for each GPU. The same for every run; all that
# it needs is in the environment that submit.sbatch set.
set -euo pipefail
exec >> "$logs/node-$SLURM_NODEID.log" 2>&1
cd -- "$submission/code"
mkdir -p -- "$logs/node-$SLURM_NODEID"

# Signals are for the processes, which save and end. torchrun, which Slurm signals as well, ignores them: it would die of
# SIGUSR1, and after SIGTERM kill processes that need more than 30 s to save. Processes ignore them too until they can
# act on them. (Older releases of torch cannot be told, and keep their way with SIGTERM.)
trap "" USR1 TERM INT
signals=()
torchrun=$("$rank_python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
if grep -q signals_to_handle "$torchrun/distributed/run.py"; then signals=(--signals-to-handle SIGHUP,SIGQUIT); fi

# Node numbers are Slurm's, so that the layout follows the nodes' order. Never restarted here: agents that restart by
# themselves do so out of step; the job as a whole is requeued.
exec "$rank_python" -m torch.distributed.run "${signals[@]}" \
    --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$processes_per_node" \
    --master-addr="$master_addr" --master-port="$master_port" --rdzv-id="$DEPTHBENCH_ATTEMPT" --max-restarts=0 \
    --log-dir="$logs/node-$SLURM_NODEID" --redirects=3 --tee=0:3 \
    -m depthbench train "$submission/run.yaml"
