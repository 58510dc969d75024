"""The command line: finds the verb's file, parses its arguments, turns a UserError into one message.

A verb is a module in this package with `describe(parser)` and `run(args) -> int`; one with several actions
(`meshwright data prepare`) has `ACTIONS` instead, or besides. Only the chosen verb's module is imported, so that
`meshwright --help` answers at once.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from meshwright._version import __version__
from meshwright.errors import ExitCode, UserError, nearest
from meshwright.limits import limit_reached
from meshwright.printable import printable
from meshwright.secrets import Secrets, guarded_output

VERBS = {
    "plan": "which strategy for a model on some machines: does it fit, how fast, and why",
    "train": "train a model: here, on n local processes, or as one rank of a launcher's job",
    "launch": "a run on hosts, Slurm, Kubernetes or Ray, or here in the background; status, logs, stop",
    "watch": "show runs while they go on, or afterwards: on a terminal, in a browser, as a timeline",
    "report": "a run as one HTML file that needs nothing else",
    "rendezvous": "serve the store where the machines of a run on several of them meet",
    "verify": "prove on this machine's CPU that a model under a strategy computes what one device computes",
    "generate": "continue a prompt from a run, a checkpoint or a Hugging Face folder",
    "data": "turn a corpus into packed token shards, check them, describe them",
    "checkpoint": "list, verify, compare, convert and remove checkpoints",
    "bench": "a training step on this machine: Meshwright and its peers side by side, and the floor under them",
    "doctor": "is this machine fit to train: hardware, what was measured, settings for NCCL",
    "models": "list the model presets with their parameter counts",
}


class Action(NamedTuple):
    """One action of a verb that has several."""

    summary: str
    describe: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """One that complains in one line: pages of usage hide what was wrong."""

    def error(self, message: str) -> NoReturn:
        """Say it, and where to read more."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` says what it takes\n")


def _table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def _usage() -> str:
    return (
        "usage: meshwright VERB [arguments]\n\n"
        "Plans, runs, watches and heals the distributed training of language models.\n\n"
        f"verbs:\n{_table(VERBS)}\n\n"
        "  meshwright VERB --help    what a verb takes\n"
        "  meshwright --version      the version\n\n"
        "start here: meshwright train --preset demo --nproc 2\n"
    )


def _unknown(kind: str, name: str, known: Iterable[str]) -> int:
    known = list(known)
    print(f"meshwright: unknown {kind} '{name}'{nearest(name, known)}; known: {', '.join(known)}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code is 0 for success, 2 for something the user can change."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage(), end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"meshwright {__version__}")
        return 0
    # DeepSpeed's launcher says it to whatever it starts, before all other arguments.
    if re.fullmatch("--local[_-]rank(=.*)?", arguments[0]):
        count = 1 if "=" in arguments[0] else 2
        arguments = arguments[count : count + 1] + arguments[:count] + arguments[count + 1 :]
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        return _unknown("verb", verb, VERBS)
    with guarded_output(Secrets.known(rest)):
        try:
            return _run(verb, rest)
        except KeyboardInterrupt:
            print(f"meshwright {verb}: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # `meshwright models | head`
            sys.stderr.close()
            return 0
        except Exception:
            # As Python itself would, but while secrets are still kept out of what is printed.
            traceback.print_exc()
            return ExitCode.FAILED


def _run(verb: str, rest: list[str]) -> int:
    """Import the verb's module, parse its arguments, do it."""
    module = import_module(f"meshwright.cli.{verb}")
    name, describe, run, about = verb, getattr(module, "describe", None), getattr(module, "run", None), module.__doc__
    actions: Mapping[str, Action] = getattr(module, "ACTIONS", {})
    if actions and (describe is None or (rest[:1] and rest[0] in actions)):
        if not rest or rest[0] in ("-h", "--help"):
            rows = _table({action: entry.summary for action, entry in actions.items()})
            print(f"usage: meshwright {verb} ACTION [arguments]\n\n{about}\nactions:\n{rows}")
            return 0
        if rest[0] not in actions:
            return _unknown(f"action of '{verb}'", rest[0], actions)
        name, rest = f"{verb} {rest[0]}", rest[1:]
        about, describe, run = actions[name.split()[1]]
    elif actions and rest and nearest(rest[0], actions) and not Path(rest[0]).exists():
        return _unknown(f"action of '{verb}'", rest[0], actions)
    assert describe is not None
    assert run is not None
    parser = _Parser(
        prog=f"meshwright {name}",
        description=about,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    describe(parser)
    try:
        return run(parser.parse_intermixed_args(rest))
    except UserError as error:
        # Names of files are in it, and words from within them.
        text = printable(str(error), keep="\n\t")
        print(f"meshwright {name}: {text}", file=sys.stderr)
        return error.exit_code
    except (OSError, RuntimeError) as error:
        if (limit := limit_reached("".join(traceback.format_exception(error)))) is None:
            raise
        print(f"meshwright {name}: {limit} ({error})", file=sys.stderr)
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
