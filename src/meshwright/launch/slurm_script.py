"""The batch script of a run on Slurm. No torch.

The script serves the store on the first machine of the job and starts `meshwright.launch.node` on each. A signal to
the batch shell, which Slurm sends some time before the limit or at a preemption, makes the run save and end with 75;
the job is then put back into the queue, unless somebody asked for its end.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator

from meshwright.elastic.rank_log import RANK_LOGS
from meshwright.launch import slurm_words as words
from meshwright.launch.submission import RUN_FILE, Submission

GRACE_S = 120
IDLE_S = 300.0

_STORE = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
case "$address" in
*[!0-9.]* | "")
    # A name. Many a machine has its own on loopback, where no other reaches it.
    address=$(getent ahostsv4 "${{address:-$first}}" | awk '$1 !~ /^127/ {{ print $1; exit }}')
    [ -n "$address" ] || address=$(hostname -I | awk '{{ print $1 }}')
    ;;
esac
run_id={name}-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
log="$folder/rendezvous-$run_id.log"
{python} -m meshwright rendezvous --listen "$address:0" --run-id "$run_id" --idle {idle:g} >"$log" 2>&1 &
store=$!
endpoint=
while [ -z "$endpoint" ]; do
    kill -0 "$store" 2>/dev/null || {{ cat "$log" >&2; exit 1; }}
    sleep 0.2
    endpoint=$(sed -n 's/.*--rendezvous \\([^ ]*\\) .*/\\1/p' "$log" | head -n 1)
done
"""

_TRAINING = """\
srun --export=ALL --kill-on-bad-exit=0 --label --output="$folder/%j-node%n.log" --open-mode=append \\
    {node} --nodes {nodes} --rendezvous "$endpoint" --run-id "$run_id" -- \\
    {train} &
training=$!
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1 TERM
code=0
while kill -0 "$training" 2>/dev/null; do
    wait "$training" && code=0 || code=$?
done
kill "$store" 2>/dev/null
echo "meshwright: the run ended with $code"
if [ "$code" = 75 ] && [ ! -e "$folder/stop-$SLURM_JOB_ID" ]; then
    echo "meshwright: saved; back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
echo "$code" >"$folder/ended-$SLURM_JOB_ID"
exit "$code"
"""


def script_of(submission: Submission, options: argparse.Namespace, folder: str, workdir: str, setup: str) -> str:
    """The whole script; run.toml lies in `folder`, and logs go there. Slurm runs a copy of it, so it says where."""
    python = str(options.python or sys.executable)
    machines = submission.machines
    nodes = "$SLURM_NNODES" if machines.least == machines.most else f"{machines.least}:$SLURM_NNODES"
    train = [f'"$folder/{RUN_FILE}"', *map(shlex.quote, submission.train("")[1:])]
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(submission, options, folder, workdir)),
        "",
        *(f"# {line}" for line in submission.said),
        f"folder={shlex.quote(folder)}",
        f'export {RANK_LOGS}="$folder/$SLURM_JOB_ID-rank"',
        *(f"export {name}={shlex.quote(value)}" for name, value in submission.environment.items()),
        setup.rstrip("\n"),
        _STORE.format(name=shlex.quote(submission.name), python=shlex.quote(python), idle=IDLE_S),
        _TRAINING.format(
            node=f"{shlex.quote(python)} -m meshwright.launch.node", nodes=f'"{nodes}"', train=" ".join(train)
        ),
    ]
    return "\n".join(parts)


def _options(submission: Submission, options: argparse.Namespace, folder: str, workdir: str) -> Iterator[str]:
    machines = submission.machines
    yield f"--job-name={submission.name}"
    yield f"--nodes={machines.range.replace(':', '-')}"
    yield "--ntasks-per-node=1"
    if machines.gpus:
        yield f"--gpus-per-node={machines.gpus}"
    if machines.least < machines.most:
        # Those that are left go on when one is lost.
        yield "--no-kill"
    yield "--requeue"
    grace = GRACE_S if options.grace is None else words.number("--grace", options.grace, 0, words.MOST_GRACE_S)
    yield f"--signal=B:USR1@{grace}"
    yield "--open-mode=append"
    yield _word(f"--output={folder}/slurm-%j.log")
    yield _word(f"--chdir={words.folder_name('the working folder', workdir)}")
    if options.cpus_per_task is not None:
        yield f"--cpus-per-task={words.number('--cpus-per-task', options.cpus_per_task, 1)}"
    given = {
        "--partition": options.partition, "--account": options.account, "--qos": options.qos, "--time": options.time,
        "--mem": options.mem, "--constraint": options.constraint,
    }  # fmt: skip
    yield from (f"{option}={words.taken(option, word)}" for option, word in given.items() if word is not None)
    if options.time is not None:
        words.check_grace(grace, "--time", options.time)
    yield from (words.own_option(word, grace) for word in options.sbatch or [])


def _word(option: str) -> str:
    """As sbatch takes an option whole: in quotes where it would end it at a space, or take the rest for a comment."""
    return option if re.fullmatch(r"[\w.,:/=@%+-]+", option) else f'"{option}"'
