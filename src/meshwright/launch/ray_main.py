"""The driver of a run on Ray, as a process of its own.

    python -m meshwright.launch.ray_main RUN.toml --workers 2:4 [--gpus yes] [--address auto|HOST:PORT]

Without an address Ray is started here, on loopback, and ends with the run. SIGTERM, SIGINT and SIGHUP are a wish to
save and end. The exit code is that of `meshwright train`.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import Any

from meshwright.config import RunConfig
from meshwright.config_load import resolve_config
from meshwright.errors import ConfigError, UserError
from meshwright.secrets import guarded_output

LOOPBACK_ONLY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""What lets a Ray of one machine listen on loopback alone, on Linux too; read when ray is imported."""

_GPUS = {"yes": True, "no": False, "auto": None}


def drive(config: RunConfig, workers: dict[str, Any], address: str | None, storage_path: str | None = None) -> int:
    """Train on the Ray at that address, or on one that is started here; `workers` is what `Workers` takes."""
    if address is None:
        os.environ.setdefault(*LOOPBACK_ONLY)
    require_ray()
    from meshwright.launch.ray_driver import Workers, drive

    return drive(config, Workers(**workers), address, storage_path)


def require_ray() -> None:
    """Raise unless Ray Train is installed."""
    try:
        import_module("ray.train")
    except ImportError as error:
        raise ConfigError(f"--on ray needs Ray Train: pip install 'meshwright[ray]' ({error})") from None


def main(words: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN.toml")
    parser.add_argument("--workers", required=True, metavar="N|MIN:MAX")
    parser.add_argument(
        "--gpus", choices=_GPUS, default="auto", help="a GPU for each worker (default: where the cluster has them)"
    )
    parser.add_argument("--cpus", type=float, default=1.0, metavar="C", help="CPUs of each worker, as Ray counts them")
    parser.add_argument("--address", metavar="auto|HOST:PORT", help="of a running Ray (default: one is started here)")
    parser.add_argument("--storage", metavar="PATH", help="Ray's storage_path (default: beside run.dir)")
    parser.add_argument("--workdir", metavar="DIR", help="where relative paths of the run begin (default: here)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of all workers")
    args = parser.parse_args(words)
    least, _, most = args.workers.partition(":")
    environment = dict(word.split("=", 1) for word in args.env)
    workers = {"least": int(least), "most": int(most or least), "gpus": _GPUS[args.gpus], "cpus": args.cpus}
    try:
        config = resolve_config(args.run, []).config
        if args.workdir is not None:
            _enter(args.workdir)
        with guarded_output(config.secrets()):
            return drive(config, {**workers, "environment": environment}, args.address, args.storage)
    except UserError as error:
        print(f"meshwright launch: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(f"--workdir {folder} is not there on the machine of Ray's driver: {error.strerror}") from None


if __name__ == "__main__":
    raise SystemExit(main())
