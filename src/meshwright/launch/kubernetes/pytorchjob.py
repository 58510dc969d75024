"""A PyTorchJob of Kubeflow's training operator (kubeflow.org/v1). No torch.

Its restart policy ExitCode starts a pod again on codes from 128 on and fails the job on lower ones, so pods are told
to end with RETRY where starting again makes sense. It does so for ever: the operator makes such pods anew, and what its
backoffLimit counts are restarts within a pod. With --nodes MIN:MAX there is no Master: the operator then takes any
worker that has finished for the end of the job.
"""

from __future__ import annotations

from meshwright.launch.kubernetes import pod
from meshwright.launch.kubernetes.options import Options
from meshwright.launch.kubernetes.pod import PORT, Table
from meshwright.launch.submission import Submission
from meshwright.launch.variables import REPLICA_INDEX

CONTAINER = "pytorch"
"""By this name the operator knows the one whose end counts."""
RETRY = 138


def pytorch_job(submission: Submission, options: Options) -> list[Table]:
    """Its object."""
    machines, name = submission.machines, submission.name
    elastic = machines.least < machines.most
    policy: Table = {"cleanPodPolicy": "Running", "ttlSecondsAfterFinished": options.ttl}
    if options.kueue:
        policy["suspend"] = True
    if options.volcano:
        policy["schedulingPolicy"] = {"minAvailable": machines.least, "queue": options.volcano}
    spec: Table = {"nprocPerNode": str(machines.processes), "runPolicy": policy}
    if elastic:
        spec["elasticPolicy"] = {"minReplicas": machines.least, "maxReplicas": machines.most, "rdzvBackend": "c10d"}
        replicas = {"Worker": _replicas(submission, options, machines.most, f"$({REPLICA_INDEX})", f"{name}-worker-0")}
        container = replicas["Worker"]["template"]["spec"]["containers"][0]
        field = {"fieldPath": "metadata.labels['training.kubeflow.org/replica-index']"}
        container["env"].append({"name": REPLICA_INDEX, "valueFrom": {"fieldRef": field}})
    else:
        host = f"{name}-master-0"
        replicas = {"Master": _replicas(submission, options, 1, "0", host)}
        if machines.most > 1:
            replicas["Worker"] = _replicas(submission, options, machines.most - 1, "$(RANK)", host)
    spec["pytorchReplicaSpecs"] = replicas
    about = pod.metadata(submission, options)
    if options.kueue:
        about["labels"]["kueue.x-k8s.io/queue-name"] = options.kueue
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": about, "spec": spec}]


def _replicas(submission: Submission, options: Options, count: int, rank: str, host: str) -> Table:
    container = pod.container(submission, options, CONTAINER, pod.start(submission, options, rank, host, RETRY))
    container["ports"] = [{"name": "pytorchjob-port", "containerPort": PORT}]
    return {
        "replicas": count,
        "restartPolicy": "ExitCode",
        "template": {
            "metadata": pod.template_metadata(submission, options),
            "spec": pod.pod_spec(submission, options, [container]),
        },
    }
