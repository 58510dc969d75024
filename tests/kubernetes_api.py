"""A cluster's API for tests: a real HTTP server on loopback that answers as Kubernetes does, without a cluster.

It holds objects against the schemas of tests/fixtures/crds, knows namespaces, claims, quotas, rights and dry runs, and
streams logs. Nothing is scheduled: a test says what became of a job and its pods.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.kubernetes_schemas import errors

KINDS = {
    "v1": {"configmaps": "ConfigMap", "services": "Service", "pods": "Pod"},
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"},
    "ray.io/v1": {"rayjobs": "RayJob", "rayclusters": "RayCluster"},
    "scheduling.volcano.sh/v1beta1": {"podgroups": "PodGroup"},
}
_NAMESPACED = re.compile(r"/(?:api|apis)/(?P<version>v1|[^/]+/[^/]+)/namespaces/(?P<namespace>[^/]+)(?P<rest>/.*)?")
Table = dict[str, Any]


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Cluster:
    """What the API knows."""

    def __init__(self) -> None:
        self.version = "31"
        self.namespaces = {"default", "team"}
        self.claims = {"training"}
        self.served = set(KINDS)
        self.objects: dict[tuple[str, str], Table] = {}
        self.pods: list[Table] = []
        self.events: list[Table] = []
        self.logs: dict[str, list[str]] = {}
        self.quotas: list[Table] = []
        self.refusals: dict[tuple[str, bool], Refused] = {}
        """What is answered when a kind is created, in a dry run or not."""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.page: str | None = None
        """What every request is answered with, where something else than an API stands at the address."""
        self.lingers = False
        """Whether deleted objects stay until their pods have ended."""

    def names(self) -> list[str]:
        """Kind/name of what there is."""
        return sorted(f"{kind}/{name}" for kind, name in self.objects)

    def created(self, dry: bool) -> list[str]:
        """Kinds that were asked to be created."""
        return [
            path.rsplit("/", 1)[1]
            for method, path, query in self.asked
            if method == "POST" and (query.get("dryRun") == "All") == dry
        ]

    def set_status(self, kind: str, name: str, **status: Any) -> None:
        """What a controller would say."""
        self.objects[kind, name]["status"] = status

    def condition(self, kind: str, name: str, what: str, reason: str = "", message: str = "") -> None:
        """A condition that is true."""
        said = {"type": what, "status": "True", "reason": reason, "message": message}
        self.set_status(kind, name, conditions=[said])

    def add_pod(self, run: str, name: str, phase: str = "Running", lines: tuple[str, ...] = (), **status: Any) -> None:
        """A pod of a run."""
        about = {"name": name, "uid": f"uid-{name}", "labels": {"app.kubernetes.io/instance": run}}
        spec = {"containers": [{"name": "training"}]}
        self.pods.append({"metadata": about, "spec": spec, "status": {"phase": phase, **status}})
        self.logs[name] = list(lines)

    def warn(self, kind: str, name: str, reason: str, message: str) -> None:
        """An event of a controller."""
        about = {"kind": kind, "name": name}
        stamp = f"2026-01-01T00:00:{len(self.events):02d}Z"
        event = {"involvedObject": about, "type": "Warning", "reason": reason, "message": message}
        self.events.append({**event, "lastTimestamp": stamp})

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """One request."""
        self.asked.append((method, path, query))
        if path == "/version":
            return 200, {"major": "1", "minor": f"{self.version}+", "gitVersion": f"v1.{self.version}.2"}
        if (found := re.fullmatch(r"/apis/([^/]+/[^/]+)", path)) is not None:
            return 200, self._resources(found[1])
        match = _NAMESPACED.fullmatch(path)
        if match is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        namespace, rest = match["namespace"], (match["rest"] or "").strip("/").split("/")
        if rest == [""]:
            if namespace not in self.namespaces:
                raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
            return 200, {"kind": "Namespace", "metadata": {"name": namespace}}
        return self._namespaced(method, match["version"], namespace, rest, query, body)

    def _resources(self, version: str) -> Table:
        if version not in self.served or version not in KINDS:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        found = [{"name": name, "kind": kind, "namespaced": True} for name, kind in KINDS[version].items()]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": found}

    def _namespaced(
        self, method: str, version: str, namespace: str, rest: list[str], query: dict[str, str], body: Any
    ) -> tuple[int, Any]:
        match method, rest:
            case "GET", ["persistentvolumeclaims", name]:
                if name not in self.claims:
                    raise Refused(404, "NotFound", f'persistentvolumeclaims "{name}" not found')
                return 200, {"kind": "PersistentVolumeClaim", "metadata": {"name": name}}
            case "GET", ["resourcequotas"]:
                return 200, {"items": self.quotas}
            case "GET", ["events"]:
                return 200, {"items": self.events}
            case "GET", ["pods"]:
                key, _, value = query["labelSelector"].partition("=")
                return 200, {"items": [pod for pod in self.pods if pod["metadata"]["labels"].get(key) == value]}
        plural, *names = rest
        kind = KINDS.get(version, {}).get(plural)
        if kind is None or version not in self.served:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if method == "POST":
            return 201, self._create(kind, namespace, query, body)
        if (kind, names[0]) not in self.objects:
            raise Refused(404, "NotFound", f'{plural} "{names[0]}" not found')
        if method == "DELETE":
            assert body["propagationPolicy"] == "Foreground"
            return 200, self._delete(kind, names[0])
        return 200, self.objects[kind, names[0]]

    def _create(self, kind: str, namespace: str, query: dict[str, str], body: Table) -> Table:
        dry = query.get("dryRun") == "All"
        name = body["metadata"]["name"]
        if namespace not in self.namespaces:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if (refused := self.refusals.get((kind, dry))) is not None:
            raise refused
        wrong = errors(body, f"1.{self.version}")
        unknown = [message for message in wrong if "Additional properties" in message]
        if unknown and query.get("fieldValidation") == "Strict":
            raise Refused(
                400, "BadRequest", f'{kind} in version "v1" cannot be handled: strict decoding error: {unknown[0]}'
            )
        if wrong:
            raise Refused(422, "Invalid", f'{kind} "{name}" is invalid: {wrong[0]}')
        if kind == "TrainJob" and ("TrainingRuntime", body["spec"]["runtimeRef"]["name"]) not in self.objects:
            raise Refused(
                403, "Forbidden", 'admission webhook "validator.trainjob" denied the request: no such runtime'
            )
        if (kind, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
        if not dry:
            self.objects[kind, name] = body
        return body

    def _delete(self, kind: str, name: str) -> Table:
        found = self.objects[kind, name]
        if self.lingers and any(pod["status"]["phase"] == "Running" for pod in self.pods):
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        else:
            del self.objects[kind, name]
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        if (found := re.fullmatch(r".*/pods/([^/]+)/log", parts.path)) is not None:
            self._log(found[1], query)
            return
        if self.cluster.page is not None:
            self._answer(200, self.cluster.page.encode())
            return
        try:
            code, answer = self.cluster.answer(self.command, parts.path, query, body)
        except Refused as refused:
            code = refused.code
            answer = {"kind": "Status", "status": "Failure", "reason": refused.reason, "message": str(refused)}
        self._answer(code, json.dumps(answer).encode())

    def _answer(self, code: int, text: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _log(self, name: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pod = next(pod for pod in self.cluster.pods if pod["metadata"]["name"] == name)
        sent = 0
        while True:
            running = query.get("follow") == "true" and pod["status"]["phase"] == "Running"
            lines = self.cluster.logs[name]
            for line in lines[sent:]:
                part = f"{line}\n".encode()
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            sent = len(lines)
            if not running:
                break
            time.sleep(0.02)
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_DELETE = _serve


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster that answers, and the kubeconfig that leads to it."""
    cluster = Cluster()
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield cluster, kubeconfig(folder, f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kubeconfig(folder: Path, address: str) -> Path:
    """A file that leads to an address."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": address}}],
        "users": [{"name": "test", "user": {"token": "a-token-of-the-test"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path
