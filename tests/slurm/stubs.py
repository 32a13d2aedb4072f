"""Slurm's commands and torchrun as small scripts that note how they were called, to run job scripts without either."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# what the scripts call besides; Slurm's own commands may lie beside them in /usr/bin, so that is not on PATH
TOOLS = ("bash", "cat", "date", "dirname", "env", "grep", "kill", "mkdir", "sleep", "seq", "touch")

SRUN = """\
printf '%s\\0' "$@" > "$NOTES/srun"
while [[ $1 == --* ]]; do
    case $1 in --nodes=*) nodes=${1#*=} ;; --ntasks-per-node=*) tasks=${1#*=} ;; esac
    shift
done
pids=()
for ((task = 0; task < nodes * tasks; task++)); do
    SLURM_NODEID=$((task / tasks)) SLURM_PROCID=$task "$@" & pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """\
case $1 in
show)
    case $2 in
    hostnames) printf 'first\\nsecond\\nthird\\n' ;;
    config) printf 'KillOnBadExit = 0\\nKillWait                = 2 sec\\n' ;;
    job)
        touch "$NOTES/job"
        # Slurm may end a job at any moment, and signals all its processes
        kill -TERM $PPID
        kill -USR1 $PPID
        echo "${JOB:-JobState=RUNNING}" ;;
    esac ;;
requeue)
    printf '%s\\0' "$@" > "$NOTES/requeue"
    read -r _ _ _ script _ < "/proc/$PPID/stat" # the parent of Python, which asks for it
    kill -TERM "$script" ;;
esac
"""
SCANCEL = """printf '%s\\0' "$@" > "$NOTES/scancel" """
# the first argument says which of Python's tasks this is; as torchrun, it may wait, and leave a status
PYTHON = f"""\
if [ "$1 $2" = "-m torch.distributed.run" ]; then
    printf '%s\\0' "$@" "cwd=$PWD" > "$NOTES/launcher-$SLURM_NODEID-$$"
    while [ -n "${{WAIT_FOR:-}}" ] && [ ! -e "$WAIT_FOR" ]; do sleep 0.05; done
    [ -z "${{STATUS:-}}" ] || printf '%s' "$STATUS" > "$STATUS_FILE"
else
    exec "{sys.executable}" "$@"
fi
"""
APPTAINER = """\
printf '%s\\0' "$@" > "$NOTES/apptainer"
shift # exec
while :; do
    case $1 in --nv) shift ;; --bind) shift 2 ;; *) break ;; esac
done
shift # the image
exec "$@"
"""


# a name, path or value that should reach the job as it is
HOSTILE = "a b'c\"d,e$(touch pwned)`touch pwned`;touch pwned&\\ \n#SBATCH --nodes=99\n-x %j ü"


def directives(script: Path) -> list[str]:
    """What sbatch reads: up to the first line that is a command."""
    found = []
    for line in script.read_text().splitlines()[1:]:
        if line.strip() and not line.startswith("#"):
            break
        found += [line] if line.startswith("#SBATCH") else []
    return found


@dataclass(frozen=True)
class Stubs:
    """bin: all that is on PATH. notes: one file a call, its arguments divided by NUL."""

    bin: Path
    notes: Path

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    def words(self, name: str) -> list[str]:
        return (self.notes / name).read_text().split("\0")[:-1]

    def launchers(self) -> list[list[str]]:
        return [self.words(file.name) for file in sorted(self.notes.glob("launcher-*"))]

    def environment(self, nodes: int, **more: str) -> dict[str, str]:
        """Of a job's script."""
        return {
            "PATH": str(self.bin),
            "NOTES": str(self.notes),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
            "SLURM_JOB_NUM_NODES": str(nodes),
            **more,
        }

    def start(self, script: Path, nodes: int = 2, **environment: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["bash", str(script)], env=self.environment(nodes, **environment), cwd="/")

    def run(self, script: Path, nodes: int = 2, **environment: str) -> int:
        """The exit status of a job's script."""
        return self.start(script, nodes, **environment).wait(timeout=120)


def make_stubs(folder: Path) -> Stubs:
    programs, notes = folder / "bin", folder / "notes"
    programs.mkdir()
    notes.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (programs / tool).symlink_to(found)
    for name, text in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("scancel", SCANCEL),
        ("python", PYTHON),
        ("apptainer", APPTAINER),
    ):
        (programs / name).write_text(f"#!{shutil.which('bash')}\n{text}")
        (programs / name).chmod(0o755)
    return Stubs(programs, notes)
