"""What sbatch takes as a limit, a size, a name; everything else is refused here, by its option. No torch.

Names and features are asked of the cluster only when a job is submitted, so here is what any of them can be made of.
Of options that are handed on as they are, those are refused that would undo what job.sh is written for: sbatch takes
the last one of two.
"""

from __future__ import annotations

import re
import shlex

from meshwright.errors import ConfigError

MOST_GRACE_S = 65_535
_NAME = r"\w[\w.@:+-]*"
_FORMS = {
    "--partition": (rf"{_NAME}(?:,{_NAME})*", "a name, or several with commas"),
    "--account": (_NAME, "a name"),
    "--qos": (rf"{_NAME}(?:,{_NAME})*", "a name"),
    "--time": (
        r"\d+(?::\d+){0,2}|\d+-\d+(?::\d+){0,2}|(?i:unlimited|infinite)",
        "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 24:00:00, or UNLIMITED",
    ),
    "--mem": (r"\d+(?i:[KMGT]B?)?", "a whole number with K, M, G or T, such as 900G"),
    "--constraint": (r"[\w.,:=/@%+&|*()\[\]-]+", "features, such as a100, a&b or [rack1|rack2]"),
}
_EARLIER_S = 60
"""Slurm sends a signal up to so much earlier than it was asked to (sbatch(1), --signal)."""
_RANKS = "each machine has one task; --processes-per-node says how many ranks"
_GPUS = "--gpus-per-node says how many"
_LOGS = "logs lie beside the run folder, where `launch logs` finds them"
_ONE_JOB = "a run is one job; launch each with a run.dir of its own"
_BACK = "a job that has saved comes back; `launch stop` saves and ends it"
_AT_ONCE = "what is submitted is a job that runs by itself; drop it"
_SET_BY_US = {
    "job-name": "--name says it",
    "nodes": "--nodes says it",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-core", "ntasks-per-gpu",
                     "ntasks-per-socket"), _RANKS),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), _GPUS),
    "no-kill": "it follows from --nodes MIN:MAX",
    **dict.fromkeys(("requeue", "no-requeue"), _BACK),
    "signal": "--grace says when it comes",
    **dict.fromkeys(("output", "error", "open-mode"), _LOGS),
    "chdir": "--workdir says it",
    **{name: f"--{name} says it" for name in ("cpus-per-task", "partition", "account", "qos", "time", "mem",
                                              "constraint")},
    "array": _ONE_JOB,
    **dict.fromkeys(("wrap", "wait", "test-only", "help", "usage", "version"), _AT_ONCE),
}  # fmt: skip
"""Options of sbatch that job.sh sets, or that leave nothing of it, and what to say instead."""
_SHORT = {
    "A": "account", "a": "array", "C": "constraint", "c": "cpus-per-task", "D": "chdir", "e": "error", "G": "gpus",
    "h": "help", "J": "job-name", "k": "no-kill", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition",
    "q": "qos", "t": "time", "V": "version", "W": "wait",
}  # fmt: skip
_WITHOUT_VALUE = "HIOQv"
"""Short options after which the next letter is another one."""


def taken(option: str, word: str) -> str:
    """The word itself, so that what was checked is what is written."""
    form, told = _FORMS[option]
    if not re.fullmatch(form, word, re.ASCII):
        raise ConfigError(f"{option} {word!r} is nothing that sbatch takes: it is {told}")
    return word


def number(option: str, value: int, least: int, most: int | None = None) -> int:
    """The number itself."""
    if value < least or (most is not None and value > most):
        most_too = f" to {most}" if most is not None else ""
        raise ConfigError(f"{option} {value} is nothing that sbatch takes: it is a number from {least}{most_too}")
    return value


def limit_s(time: str) -> int | None:
    """A limit in seconds, as Slurm counts it: in whole minutes, rounded up; None for no limit."""
    days, dash, rest = time.rpartition("-")
    if not re.fullmatch(_FORMS["--time"][0], time, re.ASCII) or not time[0].isdecimal():
        return None
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    found = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return -(-found // 60) * 60 or None


def check_grace(grace: int, option: str, time: str) -> None:
    """Refuse a limit that leaves no time to train: the job would save and be put back into the queue for ever."""
    limit = limit_s(time)
    if limit is not None and limit <= grace + _EARLIER_S:
        raise ConfigError(
            f"{option} {time} is {limit} s, and --grace {grace} asks for the signal to save {grace} s before its end, "
            f"which Slurm may send {_EARLIER_S} s earlier: no time is left to train; give more than "
            f"{grace + _EARLIER_S} s, or a smaller --grace"
        )


def own_option(word: str, grace: int) -> str:
    """An option that was given as a whole, and ends where its line does; nothing that job.sh is written for."""
    try:
        parts = shlex.split(word, comments=True) if word.isprintable() and "\\" not in word else []
    except ValueError:
        parts = []
    if not parts or not re.fullmatch(r"--[A-Za-z][\w-]*(?:=.*)?|-[A-Za-z].*", parts[0]):
        raise ConfigError(f"--sbatch {word!r} is not an option of sbatch, such as --sbatch=--reservation=night")
    if len(parts) > 2 or (len(parts) == 2 and ("=" in parts[0] or parts[1].startswith("-"))):
        raise ConfigError(f"--sbatch {word!r} is more than one option; give each its own --sbatch, spaces in quotes")
    name, value = _named(parts)
    if name in _SET_BY_US:
        raise ConfigError(f"--sbatch {word!r}: job.sh says itself what --{name} is; {_SET_BY_US[name]}")
    if name == "gres" and re.search(r"(?:^|,)(?:gres[:/])?gpu\b", value):
        raise ConfigError(f"--sbatch {word!r}: job.sh says itself what GPUs it takes; {_SET_BY_US['gpus']}")
    if name == "time-min" and value:
        check_grace(grace, "--sbatch --time-min", value)
    return word


def _named(parts: list[str]) -> tuple[str, str]:
    """The long name of an option and its value; of several short ones the first that is refused."""
    first, following = parts[0], "".join(parts[1:])
    if first.startswith("--"):
        given, _, value = first[2:].partition("=")
        # getopt takes the beginning of a name for the whole.
        known = (*_SET_BY_US, "time-min", "gres")
        found = given if given in known else next((name for name in known if name.startswith(given)), given)
        return found, value or following
    for place, letter in enumerate(first[1:], start=2):
        if letter in _SHORT:
            return _SHORT[letter], first[place:] or following
        if letter not in _WITHOUT_VALUE:
            break
    return "", ""


def folder_name(told: str, path: str) -> str:
    """A folder's name, which stands in quotes where it has spaces."""
    if set('%"\\') & set(path) or not path.isprintable():
        raise ConfigError(f"{told} has a name that sbatch cannot take: {path!r}")
    return path
