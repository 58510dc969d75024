"""Variables that cannot be given to a run: whoever starts its processes tells them something by them. No torch."""

from __future__ import annotations

import re

from meshwright.elastic.rank_log import RANK_LOGS
from meshwright.errors import ConfigError
from meshwright.launch.node import FOREIGN

REPLICA_INDEX = "MESHWRIGHT_REPLICA_INDEX"
"""Which of a PyTorchJob's workers a pod is."""
_KUBERAY = (
    r"KUBERAY_\w+|FQ_RAY_IP|RAY_(?:ADDRESS|AUTH_MODE|AUTH_TOKEN|CLOUD_INSTANCE_ID|CLUSTER_NAME|DASHBOARD_ADDRESS|IP|"
    r"JOB_SUBMISSION_ID|NODE_TYPE_NAME|PORT)"
)
_TAKEN = {
    "local": RANK_LOGS,
    "hosts": RANK_LOGS,
    "slurm": rf"{RANK_LOGS}|SLURM_(?:JOB_ID|JOB_NODELIST|NNODES|RESTART_COUNT)",
    # A Job's controller leaves an index alone that is there: all pods would be the same machine.
    "kubernetes": f"JOB_COMPLETION_INDEX|{REPLICA_INDEX}|{_KUBERAY}",
    "ray": "RAY_(?:ADDRESS|JOB_STOP_WAIT_TIME_S)",
}
"""By target, beside those of other launchers, which all of them set or take out."""


def refuse_taken(option: str, name: str, target: str) -> None:
    """Raise where a target sets or reads a variable itself."""
    if FOREIGN.fullmatch(name) or re.fullmatch(_TAKEN[target], name):
        raise ConfigError(f"{option} {name} is set by whoever starts the run's processes; leave it out")
