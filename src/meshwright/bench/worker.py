"""One contender's training in a process of its own: `python -m meshwright.bench.worker ASKED.json FOUND.json`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from meshwright.bench.clock import Clock
from meshwright.bench.contenders import CONTENDERS, Unable
from meshwright.bench.trial import Found, Trial
from meshwright.errors import UserError
from meshwright.files import write_atomically
from meshwright.parallel.world import pick_device
from meshwright.training.out_of_memory import is_out_of_memory


def measure(trial: Trial, started: float) -> Found:
    """Train in this process."""
    device = pick_device(trial.config.run.device, 0)
    clock = Clock(device, started)
    named: dict[str, Any] = {"contender": trial.contender, "micro_batch": trial.micro_batch}
    named |= {"torch": torch.__version__, **_device(device)}
    try:
        module = import_module(f"meshwright.bench.{CONTENDERS[trial.contender.split()[0]].module}")
        facts = module.train(trial, clock)
        times = clock.step_ms()
    except (Unable, UserError) as error:
        return Found(**named, refusal=str(error))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Found(**named, failure="out of memory", peak_bytes=clock.peak_bytes())
    return Found(
        **named,
        step_ms=tuple(times[trial.warm_up :]),
        losses=tuple(clock.losses()),
        peak_bytes=clock.peak_bytes(),
        first_step_s=clock.first_step_s,
        parameters=facts.parameters,
        notes=facts.notes,
    )


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {"device": torch.cuda.get_device_name(device), "device_mib": properties.total_memory / 2**20}


def main() -> int:
    """Measure what the first file asks for; leave what was found in the second."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = measure(Trial.from_json(asked["trial"]), asked["started"])
    write_atomically(Path(sys.argv[2]), json.dumps(found.as_json()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
