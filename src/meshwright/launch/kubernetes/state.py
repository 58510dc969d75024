"""How a run on Kubernetes is doing: its job's conditions, then its pods, then what the cluster warns of. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.launch.kubernetes.client import Api
from meshwright.launch.kubernetes.pod import Table
from meshwright.launch.target import State, Status

_ENDS: dict[str, State] = {"Complete": "finished", "Succeeded": "finished", "Failed": "failed"}
_RAY_ENDS: dict[str, State] = {"SUCCEEDED": "finished", "STOPPED": "stopped", "FAILED": "failed"}
_STUCK = (
    *("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"),
)
_HINTS = {
    "ImagePullBackOff": "is the --image there, and may the cluster fetch it (--image-pull-secret)?",
    "ErrImagePull": "is the --image there, and may the cluster fetch it (--image-pull-secret)?",
    "CreateContainerConfigError": "are the secrets of --secret-env there, and is the image's user not root?",
}


def status(api: Api, name: str, job: Mapping[str, Any]) -> Status:
    """How it is doing, in the cluster's words, and what to look at."""
    who = f"{job['kind'].lower()}/{job['metadata']['name']} in namespace {api.namespace}"
    found = api.get(job)
    if found is None:
        return Status("stopped", f"{who} is not there: stopped, or removed after its end; launch it again to go on")
    if found["metadata"].get("deletionTimestamp"):
        return Status("running", f"{who} is being deleted; its pods save and end")
    pods = api.pods(name)
    ended = _end(found)
    if ended is not None:
        state, words = ended
        return Status(state, "; ".join(filter(None, [who, words, *(_exits(pods) if state == "failed" else ())])))
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    trouble = next(_troubles(pods), "")
    if running:
        return Status("running", "; ".join(filter(None, [who, f"{len(running)} of {len(pods)} pods run", trouble])))
    return Status("waiting", f"{who}; {trouble or _wait(api, name, found, pods)}")


def _end(found: Table) -> tuple[State, str] | None:
    """How it ended, if it has."""
    about = found.get("status", {})
    if found["kind"] == "RayJob":
        state = _RAY_ENDS.get(about.get("jobStatus", ""))
        if about.get("jobDeploymentStatus") == "Failed":
            state = "failed"
        return None if state is None else (state, about.get("message") or about.get("reason") or "")
    if found["kind"] == "RayCluster":
        return ("failed", about.get("reason", "")) if about.get("state") == "failed" else None
    for condition in _true(found):
        if condition["type"] in _ENDS:
            return _ENDS[condition["type"]], _words(condition)
    return None


def _wait(api: Api, name: str, found: Table, pods: list[Table]) -> str:
    """Why nothing runs, where no pod says it."""
    if any(condition["type"] == "Suspended" for condition in _true(found)) or found["spec"].get("suspend"):
        return "suspended: it waits for its queue to admit it"
    warnings = api.warnings(name)
    if warnings:
        about = warnings[-1]["involvedObject"]
        return f"{about.get('kind', '').lower()}/{about['name']}: {_words(warnings[-1])}"
    return f"{len(pods)} pods, none runs yet"


def _troubles(pods: list[Table]) -> Iterator[str]:
    """What keeps pods from running."""
    for pod in pods:
        who, about = f"pod/{pod['metadata']['name']}", pod.get("status", {})
        for container in (*about.get("initContainerStatuses", ()), *about.get("containerStatuses", ())):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in _STUCK:
                hint = _HINTS.get(waiting["reason"])
                yield f"{who}: {_words(waiting)}" + (f"; {hint}" if hint else "")
        for condition in about.get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                yield f"{who} is not scheduled: {_words(condition)}"


def _exits(pods: list[Table]) -> Iterator[str]:
    """Exit codes of pods that failed."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            ended = container.get("state", {}).get("terminated") or {}
            if ended.get("exitCode"):
                yield f"pod/{pod['metadata']['name']} ended with {ended['exitCode']}"


def _true(found: Table) -> list[Table]:
    return [one for one in found.get("status", {}).get("conditions") or () if one.get("status") == "True"]


def _words(said: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (said.get("reason"), said.get("message"))))
