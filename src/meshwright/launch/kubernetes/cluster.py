"""Kubernetes as a target: objects for review, submitted whole or not at all, found again by their name. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from meshwright.errors import UserError
from meshwright.launch.kubernetes import documents, logs, options, state
from meshwright.launch.kubernetes.client import Api, Failure
from meshwright.launch.kubernetes.pod import Table
from meshwright.launch.submission import Submission
from meshwright.launch.target import Status

describe = options.describe


class _Named(BaseModel):
    name: str


class _Object(BaseModel):
    apiVersion: str
    kind: str
    metadata: _Named


class _Kept(BaseModel):
    namespace: str
    context: str | None
    objects: list[_Object] = Field(min_length=1)


class KubernetesCluster:
    """A cluster that the kubeconfig, or the pod that this runs in, leads to."""

    def check(self, submission: Submission, options: argparse.Namespace) -> None:
        """Ask the cluster: does it answer, has it the namespace, the kind and the claims, would it take the objects."""
        asked = _read(options, submission)
        api = Api.connect(asked.context, asked.namespace)
        found = api.release()
        if found is not None and found < asked.release.number:
            raise UserError(
                f"the cluster is Kubernetes {found[0]}.{found[1]}, and the objects are for {asked.release}: say "
                f"--kube-version {found[0]}.{found[1]}"
            )
        api.require_namespace()
        whole = documents.objects(submission, asked)
        for one in whole:
            api.require_kind(one)
        for volume in asked.volumes:
            if volume.kind == "pvc":
                api.require_claim(volume.source)
        api.require_quota(asked.gpu_resource, submission.machines.least * submission.machines.gpus)
        for one in whole:
            if not _needs_others(one):
                with api.explained(one):
                    api.create(one, dry=True)
        _try_pod(api, documents.sample_pod(submission, asked))

    def files(self, submission: Submission, options: argparse.Namespace) -> dict[str, str]:
        """An object a file, the run file, the plan."""
        found = documents.files(submission, _read(options, submission))
        if options.dry_run is not None:
            _refuse_others(options.dry_run, found)
        return found

    def submit(self, submission: Submission, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Create all of it, or nothing."""
        asked = _read(options, submission)
        api = Api.connect(asked.context, asked.namespace)
        made: list[Table] = []
        for one in documents.objects(submission, asked):
            try:
                with api.explained(one):
                    api.create(one)
            except BaseException:
                _remove(api, made)
                raise
            made.append(one)
        about = [
            {"apiVersion": one["apiVersion"], "kind": one["kind"], "metadata": {"name": one["metadata"]["name"]}}
            for one in made
        ]
        return {"namespace": asked.namespace, "context": api.context, "objects": about}

    def kept(self, record: Mapping[str, Any]) -> type[BaseModel]:
        """The objects, and where."""
        return _Kept

    def status(self, record: Mapping[str, Any]) -> Status:
        """What its conditions and its pods say."""
        return state.status(_api(record), record["name"], record["objects"][-1])

    def logs(self, record: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Lines of all its pods."""
        over = (lambda: self.status(record).state not in ("waiting", "running")) if follow else None
        return logs.lines(_api(record), record["name"], over)

    def stop(self, record: Mapping[str, Any]) -> str:
        """Delete the job, whose pods then have their grace period to save, and what was created with it."""
        api, job = _api(record), record["objects"][-1]
        gone = not api.delete(job)
        for one in reversed(record["objects"][:-1]):
            api.delete(one)
        name = f"{job['kind']} {job['metadata']['name']} in namespace {record['namespace']}"
        if gone:
            raise UserError(f"{name} is not there any more")
        return f"deleted {name}: its pods save and end within their grace period; launch it again to go on"


def _read(args: argparse.Namespace, submission: Submission) -> options.Options:
    return options.read_options(args, submission)


def _api(record: Mapping[str, Any]) -> Api:
    return Api.connect(record["context"], record["namespace"])


def _remove(api: Api, made: list[Table]) -> None:
    """Take back what was created before something failed; that is what is told, with what could not be taken back."""
    for one in reversed(made):
        try:
            api.delete(one)
        except UserError as error:
            print(
                f"{one['kind']} {one['metadata']['name']} stays in namespace {api.namespace}: {error}", file=sys.stderr
            )


def _try_pod(api: Api, one: Table) -> None:
    """Whether a pod as the job's would be taken: what it asks for, and what it may do, is checked only there."""
    try:
        api.create(one, dry=True)
    except Failure as failure:
        if failure.status == 403 and "cannot create resource" in failure.message:
            return  # Only the job's controller may.
        with api.explained(one):
            raise


def _refuse_others(folder: Path, files: Mapping[str, str]) -> None:
    """Whoever applies the folder would apply objects of another launch with it."""
    others = sorted(path.name for path in folder.glob("*.yaml") if path.name not in files)
    if others:
        raise UserError(f"{folder} holds {', '.join(others)} of something else; choose an empty folder, or remove them")


def _needs_others(one: Table) -> bool:
    """Whether it is refused while an object that it names is not there: a dry run creates none."""
    return bool(one["kind"] == "TrainJob")


TARGET = KubernetesCluster()
