"""A TrainJob of Kubeflow Trainer v2, and the TrainingRuntime that it runs in (trainer.kubeflow.org/v1alpha1). No torch.

The runtime has what belongs to the kind of job: how a pod ends, who it is, shared memory. The TrainJob has what belongs
to this run, its volumes and where it may go, as overrides, whose name changed with every release of Trainer while the
version of the API stayed: podSpecOverrides in 2.0, podTemplateOverrides in 2.1, runtimePatches since 2.2.
"""

from __future__ import annotations

from meshwright.launch.kubernetes import pod
from meshwright.launch.kubernetes.indexed_job import failure_limits
from meshwright.launch.kubernetes.options import Options
from meshwright.launch.kubernetes.pod import Table
from meshwright.launch.submission import Submission

GROUP = "trainer.kubeflow.org"
NODE = "node"
"""The name that Trainer knows the training's pods and their container by."""
MANAGER = "meshwright.io/launch"
_OVERRIDDEN = ("nodeSelector", "tolerations", "serviceAccountName")


def train_job(submission: Submission, options: Options) -> list[Table]:
    """The runtime and the job."""
    name = submission.name
    container = pod.container(
        submission,
        options,
        NODE,
        pod.start(submission, options, "$(JOB_COMPLETION_INDEX)", f"{name}-{NODE}-0-0.{name}"),
    )
    spec = pod.pod_spec(submission, options, [container])
    own = {volume.name for volume in options.volumes}
    override = {key: spec.pop(key) for key in _OVERRIDDEN if key in spec}
    if own:
        override["volumes"] = _named(spec["volumes"], own)
        override["containers"] = [{"name": NODE, "volumeMounts": _named(container["volumeMounts"], own)}]
        for holder, key in ((spec, "volumes"), (container, "volumeMounts")):
            holder[key] = [one for one in holder[key] if one["name"] not in own]
    trainer: Table = {
        "image": options.image,
        "command": container.pop("command"),
        "env": container.pop("env"),
        "numNodes": submission.machines.most,
        "numProcPerNode": submission.machines.processes,
    }
    if "resources" in container:
        trainer["resourcesPerNode"] = container.pop("resources")
    job: Table = {
        "runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": name},
        "trainer": trainer,
        **(_overrides(options, override) if override else {}),
    }
    if options.kueue:
        job["suspend"] = True
    about = pod.metadata(submission, options)
    if options.kueue:
        about["labels"]["kueue.x-k8s.io/queue-name"] = options.kueue
    api = {"apiVersion": f"{GROUP}/v1alpha1"}
    return [
        {**api, "kind": "TrainingRuntime", **_runtime(submission, options, spec)},
        {**api, "kind": "TrainJob", "metadata": about, "spec": job},
    ]


def _runtime(submission: Submission, options: Options, template: Table) -> Table:
    template["restartPolicy"] = "Never"
    job: Table = {**failure_limits(options, submission.machines.most)}
    if options.release.has("podFailurePolicy"):
        job["podFailurePolicy"] = pod.pod_failure_policy(NODE, options.release)
    if options.release.has("podReplacementPolicy"):
        job["podReplacementPolicy"] = "Failed"
    job["template"] = {"metadata": pod.template_metadata(submission, options), "spec": template}
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    jobset: Table = {"replicatedJobs": [{"name": NODE, "template": {"metadata": {"labels": step}, "spec": job}}]}
    spec: Table = {
        "mlPolicy": {"numNodes": submission.machines.most, "torch": {}},
        "template": {"spec": jobset},
    }
    if options.volcano:
        spec["podGroupPolicy"] = {"volcano": {}}
        spec["template"]["metadata"] = {"annotations": {"scheduling.volcano.sh/queue-name": options.volcano}}
    about = pod.metadata(submission, options)
    about["labels"]["trainer.kubeflow.org/framework"] = "torch"
    return {"metadata": about, "spec": spec}


def _overrides(options: Options, pods: Table) -> Table:
    target = [{"name": NODE}]
    match options.trainer:
        case "2.0":
            return {"podSpecOverrides": [{"targetJobs": target, **pods}]}
        case "2.1":
            return {"podTemplateOverrides": [{"targetJobs": target, "spec": pods}]}
    job = {"name": NODE, "template": {"spec": {"template": {"spec": pods}}}}
    return {
        "runtimePatches": [
            {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        ]
    }


def _named(entries: list[Table], names: set[str]) -> list[Table]:
    return [entry for entry in entries if entry["name"] in names]
