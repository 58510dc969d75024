"""One pod of a run: what it starts, sees, may do and asks for; the same for every kind of job. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import ExitCode
from meshwright.launch.kubernetes.options import Options
from meshwright.launch.kubernetes.versions import Release
from meshwright.launch.kubernetes.volumes import RUN_MOUNT, SHM_MOUNT
from meshwright.launch.submission import RUN_FILE, Submission

PORT = 29400
"""Where the machines meet: each pod has an address of its own, so every run can have the same."""
WAIT_S = 1800
"""How long a pod waits for the first one; pods of one job may be scheduled minutes apart."""
FATAL = (ExitCode.BAD_INPUT, ExitCode.DIVERGED, ExitCode.DAMAGED, ExitCode.NO_PROGRESS, ExitCode.OUT_OF_MEMORY)
"""Exit codes after which starting again changes nothing, whoever does."""
Table = dict[str, Any]


def labels(name: str) -> dict[str, str]:
    """Of every object of a run, and its pods."""
    return {
        "app.kubernetes.io/name": "meshwright",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": "training",
        "app.kubernetes.io/managed-by": "meshwright",
    }


def metadata(submission: Submission, options: Options, name: str | None = None) -> Table:
    """Of an object of the run."""
    return {
        "name": name or submission.name,
        "namespace": options.namespace,
        "labels": labels(submission.name),
    }


def start(submission: Submission, options: Options, rank: str, host: str, retry: int | None = None) -> list[str]:
    """The command of one machine's pod."""
    words = [options.python, "-m", "meshwright.launch.node", "--nodes", submission.machines.range, "--rank", rank]
    words += ["--rendezvous", f"{host}:{PORT}", "--run-id", submission.name, "--wait", str(WAIT_S)]
    if retry is not None:
        words += ["--retry-code", str(retry)]
    return [*words, "--", *submission.train(f"{RUN_MOUNT}/{RUN_FILE}")]


def environment(submission: Submission, options: Options) -> list[Table]:
    """Variables of the container; secrets by reference."""
    plain = {"PYTHONUNBUFFERED": "1"}
    if not options.is_ray:
        # The user has no entry in the image's /etc/passwd, perhaps; compilers' caches ask for a name and a home.
        plain |= {"HOME": "/tmp", "USER": "meshwright"}
    plain |= options.nccl | dict(submission.environment)
    return [{"name": name, "value": value} for name, value in plain.items()] + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, secret, key in options.secrets
    ]


def resources(submission: Submission, options: Options) -> Table:
    """What each machine's pod asks for, and no more: with cores and memory such pods are the last to be evicted."""
    asked: dict[str, str] = {}
    if options.cpu:
        asked["cpu"] = options.cpu
    if options.memory:
        asked["memory"] = options.memory
    if submission.machines.gpus:
        asked[options.gpu_resource] = str(submission.machines.gpus)
    if options.rdma:
        asked[options.rdma[0]] = str(options.rdma[1])
    return {"requests": asked, "limits": dict(asked)} if asked else {}


def container(
    submission: Submission, options: Options, name: str, command: list[str] | None, asks: Table | None = None
) -> Table:
    """The container that trains."""
    asks = resources(submission, options) if asks is None else asks
    return {
        "name": name,
        "image": options.image,
        **({"command": command} if command is not None else {}),
        "workingDir": options.home,
        "env": environment(submission, options),
        **({"resources": asks} if asks else {}),
        "securityContext": container_security(options),
        "volumeMounts": mounts(options),
    }


def mounts(options: Options) -> list[Table]:
    """What a container sees of the pod's volumes."""
    return [
        {"name": "meshwright", "mountPath": RUN_MOUNT, "readOnly": True},
        {"name": "shm", "mountPath": SHM_MOUNT},
        *(volume.as_mount() for volume in options.volumes),
    ]


def volumes(submission: Submission, options: Options) -> list[Table]:
    """Of a pod: the run file, shared memory, and what was asked for."""
    return [
        {"name": "meshwright", "configMap": {"name": submission.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
        *(volume.as_volume() for volume in options.volumes),
    ]


def pod_spec(submission: Submission, options: Options, containers: list[Table], asks_cluster: bool = False) -> Table:
    """A pod around its containers; only one that asks the cluster for machines has a token for it unasked."""
    spec: Table = {"containers": containers, "volumes": volumes(submission, options)}
    spec["securityContext"] = pod_security(options)
    spec["terminationGracePeriodSeconds"] = options.grace
    if options.account:
        spec["serviceAccountName"] = options.account
    elif not asks_cluster:
        spec["automountServiceAccountToken"] = False
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    if options.priority:
        spec["priorityClassName"] = options.priority
    if options.volcano and not options.is_ray:  # Ray's operator says so itself.
        spec["schedulerName"] = "volcano"
    return spec | placement(submission, options)


def placement(submission: Submission, options: Options) -> Table:
    """Which machines a pod may go to, and which it should."""
    found: Table = {}
    if options.selector:
        found["nodeSelector"] = options.selector
    tolerations = list(options.tolerations)
    if submission.machines.gpus:
        tolerations.append({"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    if tolerations:
        found["tolerations"] = tolerations
    if options.topology:
        term = {
            "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": submission.name}},
            "topologyKey": options.topology,
        }
        wish = {"weight": 100, "podAffinityTerm": term}
        found["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
    return found


def template_metadata(submission: Submission, options: Options, more: Mapping[str, str] | None = None) -> Table:
    """Of a pod template."""
    notes = dict(more or {})
    if options.kueue and options.topology:
        notes["kueue.x-k8s.io/podset-preferred-topology"] = options.topology
    return {"labels": labels(submission.name), **({"annotations": notes} if notes else {})}


def pod_security(options: Options) -> Table:
    """Who the pod's processes are; files of its volumes belong to their group."""
    user = options.user
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(options: Options) -> Table:
    """Nothing beyond an ordinary process, but for locking memory where RDMA was asked for."""
    found = ordinary_security()
    if options.rdma:
        found["capabilities"]["add"] = ["IPC_LOCK"]
    return found


def ordinary_security() -> Table:
    """What the Pod Security level `restricted` asks of a container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod_failure_policy(container_name: str, release: Release, elastic: bool = False) -> Table:
    """What a Job does when a pod ends: one that saved, or lost the others, starts again as often as that happens, as do
    pods whose machine is lost; hopeless ones end the job; all others are counted. A quarantined machine ends the job,
    too, unless the others can go on without it (`elastic`, which takes failures counted by index)."""

    def codes(action: str, values: list[int]) -> Table:
        rule: Table = {"containerName": container_name, "operator": "In", "values": values}
        # The schema of releases before 1.29 requires the empty list, and kubectl holds files against it.
        return {"action": action, "onExitCodes": rule, **({"onPodConditions": []} if release.number < (1, 29) else {})}

    lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    quarantined = int(ExitCode.QUARANTINED)
    fatal = sorted(int(code) for code in FATAL)
    return {
        "rules": [
            codes("FailJob", fatal if elastic else [*fatal, quarantined]),
            *([codes("FailIndex", [quarantined])] if elastic else []),
            codes("Ignore", [int(ExitCode.PARTITIONED), int(ExitCode.PREEMPTED)]),
            lost,
        ]
    }
