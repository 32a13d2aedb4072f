# Slurm's own output is /dev/null. So until the run's log is open, what goes wrong is told in the folder where sbatch
# was called, or else in /tmp of the first node (launch/slurm/no_log.sh).
set -euo pipefail
: "${SLURM_JOB_ID:?this script runs under Slurm: sbatch submit.sbatch}"
job=$SLURM_JOB_ID
# in an array, the last task's id is the array's, and Slurm's commands would take it for all of its tasks
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
no_log() {
    for folder in "${SLURM_SUBMIT_DIR:-/tmp}" /tmp; do
        echo "depthbench: job $job on ${SLURMD_NODENAME:-$HOSTNAME}: $*" >> "$folder/depthbench-$job.log" && break
    done
    exit 1
}

