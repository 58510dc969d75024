"""The objects of a run as files: what is submitted, and what --dry-run writes for review. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from meshwright.errors import UserError
from meshwright.launch.kubernetes import pod
from meshwright.launch.kubernetes.indexed_job import indexed_job
from meshwright.launch.kubernetes.options import Options
from meshwright.launch.kubernetes.pod import Table
from meshwright.launch.kubernetes.pytorchjob import pytorch_job
from meshwright.launch.kubernetes.ray_objects import RAY_DASHBOARD, RAY_OPERATOR, ray_cluster, ray_job
from meshwright.launch.kubernetes.trainjob import train_job
from meshwright.launch.submission import PLAN_FILE, RUN_FILE, Submission

ROOM = 1_000_000
"""Bytes of a ConfigMap, whose limit is 1 MiB."""
APPLIED = 200_000
"""Bytes of a ConfigMap that `kubectl apply` takes: it copies objects as JSON into an annotation, and all annotations of
one have room for 262,144."""
_LONG = ("candidates", "runners_up", "fewer_gpus", "ways", "tried")
"""Tables of a plan that the run itself does not need, the longest first."""
_MAKERS = {
    "job": indexed_job,
    "pytorchjob": pytorch_job,
    "trainjob": train_job,
    "rayjob": ray_job,
    "raycluster": ray_cluster,
}


def run_files(submission: Submission) -> dict[str, str]:
    """The run file and the plan, as much of it as `kubectl apply` takes; it says itself what was left out."""
    files = submission.files()
    if _applied(files) <= APPLIED:
        return files
    for count in range(len(_LONG) + 1):
        files[PLAN_FILE] = _without(submission.plan_file, _LONG[:count])
        if _applied(files) <= APPLIED:
            return files
    # The run file itself is so long; it can still be created, and applied by the server.
    if sum(len(text.encode()) for text in files.values()) <= ROOM:
        return files
    raise UserError(
        f"{RUN_FILE} and {PLAN_FILE} have more than the {ROOM:,} bytes that a ConfigMap has room for; make the run "
        "file shorter, such as data.mix by a folder that was prepared from all of it"
    )


def _applied(files: Mapping[str, str]) -> int:
    """Bytes that they have as JSON, as kubectl writes it: <, > and & are six each."""
    text = json.dumps(dict(files))
    return len(text) + 5 * sum(map(text.count, "<>&"))


def objects(submission: Submission, options: Options) -> list[Table]:
    """The objects, in the order in which they are created; the last one is the job."""
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": pod.metadata(submission, options),
        "data": run_files(submission),
    }
    policy = [_isolation(submission, options)] if options.isolated else []
    return [config_map, *policy, *_MAKERS[options.kind](submission, options)]


def _isolation(submission: Submission, options: Options) -> Table:
    """Neither the store nor NCCL asks who is calling; so nobody else can call, but KubeRay's operator a Ray head."""
    ours = {"matchLabels": {"app.kubernetes.io/instance": submission.name}}
    ingress: list[Table] = [{"from": [{"podSelector": ours}]}]
    if options.is_ray:
        operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": RAY_OPERATOR}}
        ingress.append({"from": [operator], "ports": [{"protocol": "TCP", "port": RAY_DASHBOARD}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": pod.metadata(submission, options),
        "spec": {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def files(submission: Submission, options: Options) -> dict[str, str]:
    """What --dry-run writes: an object a file, in names that sort as they are created, and what they were made of."""
    found = {}
    for number, one in enumerate(objects(submission, options), start=1):
        more = one["metadata"]["name"].removeprefix(submission.name)
        found[f"{number:02d}-{one['kind'].lower()}{more}.yaml"] = as_yaml(one)
    return found | run_files(submission)


def sample_pod(submission: Submission, options: Options) -> Table:
    """A pod as the job's are: to ask whether the namespace would take it."""
    container = pod.container(submission, options, "training", pod.start(submission, options, "0", submission.name))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": pod.metadata(submission, options),
        "spec": pod.pod_spec(submission, options, [container]) | {"restartPolicy": "Never"},
    }


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and no anchors: each object is read on its own."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(one: Table) -> str:
    """An object for people and kubectl."""
    return yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _without(plan: str, tables: Sequence[str]) -> str:
    """A plan on one line, less some of its tables."""
    content = json.loads(plan)
    for table in tables:
        (content["answer"] or {}).pop(table, None)
    said = {"left_out": f"{', '.join(tables)}: `kubectl apply` has no room"} if tables else {}
    return json.dumps({**said, **content}, separators=(",", ":")) + "\n"
