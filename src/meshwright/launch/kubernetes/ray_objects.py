"""A RayCluster, alone or in a RayJob (ray.io/v1, KubeRay): a head that trains nothing, a worker for each machine.

No torch.
"""

from __future__ import annotations

import shlex

from meshwright.launch.kubernetes import pod
from meshwright.launch.kubernetes.options import Options
from meshwright.launch.kubernetes.pod import Table
from meshwright.launch.kubernetes.volumes import RUN_MOUNT
from meshwright.launch.submission import RUN_FILE, Submission

GROUP = "machines"
RAY_DASHBOARD, RAY_OPERATOR = 8265, {"app.kubernetes.io/name": "kuberay-operator"}
"""Where KubeRay's operator asks how a job is, and the label of its pod in its own Helm chart."""
RAY_VERSION = "2.60.0"
"""What meshwright[ray] installs; without it KubeRay refuses clusters that ask for a token."""


def entrypoint(submission: Submission, options: Options) -> str:
    """What runs on the head: the same run, launched on the Ray cluster that it is in."""
    machines = submission.machines
    words = [options.python, "-m", "meshwright", "launch", f"{RUN_MOUNT}/{RUN_FILE}", "--on", "ray"]
    words += ["--nodes", machines.range, "--gpus-per-node", str(machines.gpus), "--nproc", str(machines.processes)]
    return shlex.join([*words, "--name", submission.name])


def ray_job(submission: Submission, options: Options) -> list[Table]:
    """A cluster for this run alone, which ends with it."""
    spec: Table = {
        "entrypoint": entrypoint(submission, options),
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": {
            "metadata": pod.template_metadata(submission, options),
            "spec": _submitter(submission, options),
        },
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.ttl,
        "backoffLimit": options.backoff,
        "rayClusterSpec": _cluster(submission, options),
    }
    return [_object("RayJob", submission, options, spec)]


def ray_cluster(submission: Submission, options: Options) -> list[Table]:
    """A cluster that stays; what to start on it is in its annotation."""
    found = _object("RayCluster", submission, options, _cluster(submission, options))
    found["metadata"]["annotations"] = {"meshwright.io/entrypoint": entrypoint(submission, options)}
    return [found]


def _submitter(submission: Submission, options: Options) -> Table:
    """The pod that hands the entrypoint to the head; KubeRay adds its command."""
    container = pod.container(submission, options, "ray-job-submitter", None, _asks("500m", "512Mi"))
    spec = pod.pod_spec(submission, options, [container]) | {"restartPolicy": "Never"}
    for holder, keys in (
        (container, ("workingDir", "env", "volumeMounts")),
        (spec, ("volumes", "affinity", "nodeSelector", "tolerations")),
    ):
        for key in keys:
            holder.pop(key, None)
    return spec


def _object(kind: str, submission: Submission, options: Options, spec: Table) -> Table:
    about = pod.metadata(submission, options)
    if options.kueue:
        about["labels"]["kueue.x-k8s.io/queue-name"] = options.kueue
        spec["suspend"] = True
    if options.volcano:
        about["labels"] |= {"ray.io/gang-scheduling-enabled": "true", "volcano.sh/queue-name": options.volcano}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": about, "spec": spec}


def _cluster(submission: Submission, options: Options) -> Table:
    machines = submission.machines
    elastic = machines.least < machines.most
    head = pod.container(submission, options, "ray-head", None, _asks(*options.head))
    worker = pod.container(submission, options, "ray-worker", None)
    head_pod = pod.pod_spec(submission, options, [head], asks_cluster=elastic)  # By the autoscaler, which runs there.
    for key in ("affinity", "nodeSelector"):  # Wishes of the machines that train.
        head_pod.pop(key, None)
    # The autoscaler's container is KubeRay's, which gives it no other security context than this one.
    autoscaler = {"autoscalerOptions": {"securityContext": pod.ordinary_security()}} if elastic else {}
    return {
        "rayVersion": RAY_VERSION,
        # Ray runs the code of whoever reaches it: KubeRay makes a token, a Secret, for those who may.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": elastic,
        **autoscaler,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": {"metadata": pod.template_metadata(submission, options), "spec": head_pod},
        },
        "workerGroupSpecs": [
            {
                "groupName": GROUP,
                "replicas": machines.least if elastic else machines.most,
                "minReplicas": machines.least,
                "maxReplicas": machines.most,
                # The autoscaler must know them, and KubeRay tells it only of those that the pod asks for.
                "rayStartParams": {} if options.cpu else {"num-cpus": str(machines.processes)},
                "template": {
                    "metadata": pod.template_metadata(submission, options),
                    "spec": pod.pod_spec(submission, options, [worker]),
                },
            }
        ],
    }


def _asks(cpu: str, memory: str) -> Table:
    asked = {"cpu": cpu, "memory": memory}
    return {"requests": asked, "limits": dict(asked)}
