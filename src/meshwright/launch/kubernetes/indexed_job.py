"""A plain Job, which needs no operator: one pod for each index, found by name through a headless Service. No torch.

Beside it lies a hostfile, `host slots=n` for each machine, mounted where DeepSpeed looks for one: /job/hostfile.
"""

from __future__ import annotations

from meshwright.launch.kubernetes import pod
from meshwright.launch.kubernetes.options import Options
from meshwright.launch.kubernetes.pod import PORT, Table
from meshwright.launch.kubernetes.volumes import HOSTFILE_MOUNT
from meshwright.launch.submission import Submission

CONTAINER = "training"


def indexed_job(submission: Submission, options: Options) -> list[Table]:
    """Its objects, in the order in which they are created."""
    found = [_hostfile(submission, options), _service(submission, options)]
    if options.volcano:
        found.append(_pod_group(submission, options, options.volcano))
    return [*found, _job(submission, options)]


def failure_limits(options: Options, machines: int, spare: int = 0) -> Table:
    """How often pods may fail: each machine's so often where the release counts them apart, else all together."""
    if options.release.has("backoffLimitPerIndex"):
        return {"backoffLimitPerIndex": options.backoff, "maxFailedIndexes": spare}
    return {"backoffLimit": options.backoff * machines}


def _job(submission: Submission, options: Options) -> Table:
    machines, name = submission.machines, submission.name
    elastic = machines.least < machines.most
    container = pod.container(
        submission, options, CONTAINER, pod.start(submission, options, "$(JOB_COMPLETION_INDEX)", f"{name}-0.{name}")
    )
    container["ports"] = [{"name": "rendezvous", "containerPort": PORT}]
    container["volumeMounts"].append({"name": "hostfile", "mountPath": HOSTFILE_MOUNT, "readOnly": True})
    template = pod.pod_spec(submission, options, [container])
    template["volumes"].append({"name": "hostfile", "configMap": {"name": f"{name}-hostfile"}})
    template |= {"restartPolicy": "Never", "subdomain": name}
    notes = {"scheduling.k8s.io/group-name": name} if options.volcano else {}
    spec: Table = {
        "completionMode": "Indexed",
        "completions": machines.most,
        "parallelism": machines.most,
        **failure_limits(options, machines.most, machines.most - machines.least),
    }
    if options.release.has("podFailurePolicy"):
        spec["podFailurePolicy"] = pod.pod_failure_policy(CONTAINER, options.release, elastic)
    if options.release.has("podReplacementPolicy"):
        spec["podReplacementPolicy"] = "Failed"
    if elastic:
        # A machine that came too late, or not at all, is not waited for.
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    if options.kueue:
        spec["suspend"] = True
    spec["ttlSecondsAfterFinished"] = options.ttl
    spec["template"] = {"metadata": pod.template_metadata(submission, options, notes), "spec": template}
    about = pod.metadata(submission, options)
    if options.kueue:
        about["labels"]["kueue.x-k8s.io/queue-name"] = options.kueue
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}


def _service(submission: Submission, options: Options) -> Table:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pod.metadata(submission, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/instance": submission.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _hostfile(submission: Submission, options: Options) -> Table:
    name, machines = submission.name, submission.machines
    lines = [f"{name}-{index}.{name} slots={machines.processes}\n" for index in range(machines.most)]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": pod.metadata(submission, options, f"{name}-hostfile"),
        "data": {"hostfile": "".join(lines)},
    }


def _pod_group(submission: Submission, options: Options, queue: str) -> Table:
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": pod.metadata(submission, options),
        "spec": {"minMember": submission.machines.least, "queue": queue},
    }
