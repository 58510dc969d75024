"""What is asked of a cluster's API, through the official Python client, and what its answers mean. No torch.

Objects are plain tables, as they are in the files; the client signs in, as the kubeconfig says, and talks HTTP.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from meshwright.errors import UserError
from meshwright.launch.kubernetes.pod import Table

MANAGER = "meshwright"
TIMEOUT_S = 30.0
_PLURALS = {
    "ConfigMap": "configmaps",
    "Job": "jobs",
    "NetworkPolicy": "networkpolicies",
    "PodGroup": "podgroups",
    "Pod": "pods",
    "PyTorchJob": "pytorchjobs",
    "RayCluster": "rayclusters",
    "RayJob": "rayjobs",
    "Service": "services",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
}
_OPERATORS = {
    "kubeflow.org": "Kubeflow's training operator (1.9)",
    "trainer.kubeflow.org": "Kubeflow Trainer (2.0 or newer)",
    "ray.io": "KubeRay (1.5.1 or newer)",
    "scheduling.volcano.sh": "Volcano",
}


class Failure(UserError):
    """The API answered, and not with what was asked for."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the cluster answers {status} {reason}: {message}")
        self.status, self.message = status, message


class Api:
    """One namespace of a cluster."""

    def __init__(self, client: Any, namespace: str, context: str | None) -> None:
        self.client, self.namespace, self.context = client, namespace, context

    @classmethod
    def connect(cls, context: str | None, namespace: str) -> Api:
        """As the kubeconfig says, or, without one, as the pod that this runs in may."""
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError:
            raise UserError("talking to a cluster needs its client: pip install 'meshwright[kubernetes]'") from None
        settings = client.Configuration()
        settings.retries = False
        file = os.environ.get("KUBECONFIG")
        try:
            config.load_kube_config(file, context, settings)
            # Written down by its name: the current one may be another when the run is looked for again.
            context = context or config.list_kube_config_contexts(file)[1]["name"]
        except ConfigException as error:
            try:
                if context is not None:
                    raise error
                config.load_incluster_config(settings)
            except ConfigException:
                raise UserError(
                    f"no cluster is known here: {error}; set KUBECONFIG, or write the files with --dry-run DIR and "
                    "submit them with kubectl"
                ) from None
        except (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise UserError(
                f"the kubeconfig {file or '~/.kube/config'} cannot be read: {_trouble(error)}; mend it, or set "
                "KUBECONFIG to another one"
            ) from None
        return cls(client.ApiClient(settings), namespace, context)

    def call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None, stream: bool = False
    ) -> Any:
        """One request; the answer as a table, or as a stream of bytes."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = self.client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                response_type=None if stream else "object",
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=not stream,
                _request_timeout=None if stream else TIMEOUT_S,
            )
        except ApiException as error:
            if not error.status:
                raise UserError(f"the cluster at {self.address} is not reached: {error.reason}") from None
            raise _failure(error) from None
        except HTTPError as error:
            raise UserError(f"the cluster at {self.address} does not answer: {error}") from None
        if not stream and not isinstance(answer, dict):
            said = " ".join(str(answer).split())[:200]
            raise UserError(
                f"what answers at {self.address} is no API of Kubernetes: {said or 'nothing'}; is it a page to "
                "sign in, or the address in the kubeconfig another's?"
            )
        return answer

    @property
    def address(self) -> str:
        """Where the API is."""
        return str(self.client.configuration.host)

    def path(self, one: Mapping[str, Any], name: str | None = None) -> str:
        """Of a kind of objects in the namespace, or of one of them."""
        root = f"/api/{one['apiVersion']}" if "/" not in one["apiVersion"] else f"/apis/{one['apiVersion']}"
        place = f"{root}/namespaces/{self.namespace}/{_PLURALS[one['kind']]}"
        return f"{place}/{name}" if name else place

    def core(self, rest: str) -> str:
        """A path of the namespace's own things."""
        return f"/api/v1/namespaces/{self.namespace}{rest}"

    def release(self) -> tuple[int, int] | None:
        """The cluster's release of Kubernetes; None where it does not say. Refuses when nothing answers."""
        found = self.call("GET", "/version")
        with suppress(KeyError, ValueError, TypeError):
            return int(found["major"]), int(re.sub(r"\D.*", "", found["minor"]))
        return None

    def require_namespace(self) -> None:
        """Refuse one that is not there."""
        try:
            self.call("GET", self.core(""))
        except Failure as failure:
            if failure.status == 404:
                raise UserError(
                    f"the namespace {self.namespace} does not exist in the cluster at {self.address}; create it with "
                    f"`kubectl create namespace {self.namespace}`, or say another --namespace"
                ) from None
            if failure.status != 403:  # Whoever may not look at it may still create in it.
                raise

    def require_kind(self, one: Mapping[str, Any]) -> None:
        """Refuse a kind that the cluster does not know."""
        version = one["apiVersion"]
        if "/" not in version:
            return
        try:
            known = self.call("GET", f"/apis/{version}")
        except Failure as failure:
            if failure.status != 404:
                raise
            known = {"resources": []}
        if not any(entry.get("kind") == one["kind"] for entry in known.get("resources") or ()):
            operator = _OPERATORS.get(version.partition("/")[0], f"what serves {version}")
            raise UserError(
                f"the cluster does not know {one['kind']} of {version}: {operator} is not installed there, or in "
                "another version; --kind job needs no operator"
            )

    def require_claim(self, name: str) -> None:
        """Refuse a claim that is not there: pods would wait for it for ever."""
        try:
            self.call("GET", self.core(f"/persistentvolumeclaims/{name}"))
        except Failure as failure:
            if failure.status == 404:
                raise UserError(
                    f"there is no PersistentVolumeClaim {name} in namespace {self.namespace}, which --volume names"
                ) from None
            if failure.status != 403:
                raise

    def require_quota(self, resource: str, count: int) -> None:
        """Refuse more of a resource than the namespace may ever have."""
        with suppress(Failure):
            for quota in self._items("/resourcequotas"):
                hard = str(quota.get("spec", {}).get("hard", {}).get(f"requests.{resource}", ""))
                if hard.isdecimal() and int(hard) < count:
                    name = quota["metadata"]["name"]
                    raise UserError(
                        f"the run asks for {count} {resource}, and ResourceQuota {name} of namespace "
                        f"{self.namespace} allows {hard}; take fewer --nodes or --gpus-per-node, or another --namespace"
                    )

    def _items(self, rest: str, query: Mapping[str, str] | None = None) -> list[Table]:
        """What a list of the namespace's own things holds."""
        return list(self.call("GET", self.core(rest), query).get("items") or ())

    def create(self, one: Table, dry: bool = False) -> None:
        """Create an object; `dry` only asks whether it would be taken."""
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict", **({"dryRun": "All"} if dry else {})}
        self.call("POST", self.path(one), query, one)

    def get(self, one: Mapping[str, Any]) -> Table | None:
        """The object as it is now."""
        return self._found("GET", one)

    def delete(self, one: Mapping[str, Any]) -> bool:
        """Delete an object after what belongs to it; whether it was there."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        return self._found("DELETE", one, body) is not None

    def _found(self, method: str, one: Mapping[str, Any], body: Any = None) -> Table | None:
        try:
            return dict(self.call(method, self.path(one, one["metadata"]["name"]), body=body))
        except Failure as failure:
            if failure.status == 404:
                return None
            raise

    def pods(self, name: str) -> list[Table]:
        """The pods of a run, by name."""
        query = {"labelSelector": f"app.kubernetes.io/instance={name}"}
        return sorted(self._items("/pods", query), key=lambda pod: pod["metadata"]["name"])

    def warnings(self, name: str) -> list[Table]:
        """Warnings about a run's objects and pods, the newest last; none where one may not see them."""
        try:
            found = self._items("/events", {"fieldSelector": "type=Warning"})
        except Failure:
            return []
        ours = [event for event in found if _is_of(str(event.get("involvedObject", {}).get("name", "")), name)]
        return sorted(ours, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    @contextmanager
    def explained(self, one: Mapping[str, Any]) -> Iterator[None]:
        """Say what it means when an object is not taken."""
        try:
            yield
        except Failure as failure:
            raise UserError(self._explain(failure, one)) from None

    def _explain(self, failure: Failure, one: Mapping[str, Any]) -> str:
        name = f"{one['kind']} {one['metadata']['name']}"
        match failure.status:
            case 409:
                return (
                    f"{name} is in namespace {self.namespace} already: `meshwright launch stop RUN` removes it (or "
                    f"kubectl delete), or choose another --name"
                )
            case 403 if "exceeded quota" in failure.message:
                return f"the quota of namespace {self.namespace} has no room for {name}: {failure.message}"
            case 401 | 403:
                return f"you may not create {name} in namespace {self.namespace}: {failure.message}"
            case 400 | 422:
                return f"the cluster refuses {name}: {failure.message}"
        return f"{name} was not created: {failure}"


def _trouble(error: Exception) -> str:
    """What is wrong with a kubeconfig, without its words: there are tokens among them."""
    if isinstance(error, OSError):
        return error.strerror or "it is no file"
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1} is no YAML" if mark is not None else "it has not the form of one"


def _is_of(found: str, name: str) -> bool:
    return found == name or found.startswith(f"{name}-")


def _failure(error: Any) -> Failure:
    """An answer that is no success; its body is a Status, or whatever stands between us and the API sent."""
    body = error.body.decode("utf-8", "replace") if isinstance(error.body, bytes) else str(error.body or "")
    with suppress(ValueError, AttributeError):
        said = json.loads(body)
        return Failure(error.status, said.get("reason") or error.reason, said.get("message") or "no message")
    return Failure(error.status, str(error.reason), " ".join(body.split())[:300] or "no message")
