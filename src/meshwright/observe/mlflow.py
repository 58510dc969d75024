"""MLflow: each step's metrics to a tracking server, by its REST interface.

The server is the one that MLFLOW_TRACKING_URI names, http:// or https://; MLflow's own package is not needed here. A
run that goes on after a stop goes on in MLflow, too: it is found again by the identity of the run folder.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.observe.export import Exporter, Record
from meshwright.secrets import login_of, public, without_login
from meshwright.training.loop import TrainingLoop

TAG = "meshwright.run"
"""The tag by which a run is found again."""
ANSWER_S = 10.0
"""How long the server may be silent before it is asked again."""
TRY_S = 300.0
"""How long it is asked again while it does not answer, or says that it cannot for now."""
MOST_METRICS, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 500
"""What the server takes at a time."""


class MLflow(Exporter):
    """A run on a tracking server."""

    name = "MLflow"

    def __init__(self, trainer: TrainingLoop) -> None:
        self._server = Server(os.environ["MLFLOW_TRACKING_URI"], os.environ)
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "meshwright")
        self._identity, self._title = trainer.run_id, trainer.job.folder.path.name
        self._settings = dict(_flat(public(trainer.config.model_dump(mode="json", exclude_none=True))))
        self._run = ""

    def open(self) -> None:
        experiment = self._find_experiment()
        search = {"experiment_ids": [experiment], "filter": f"tags.`{TAG}` = '{self._identity}'", "max_results": 1}
        found = self._server.post("runs/search", search).get("runs", [])
        if found:
            self._run = found[0]["info"]["run_id"]
            self._server.post("runs/update", {"run_id": self._run, "status": "RUNNING"})
            return
        tags = [{"key": TAG, "value": self._identity}]
        asked = {"experiment_id": experiment, "run_name": self._title, "start_time": _now(), "tags": tags}
        self._run = self._server.post("runs/create", asked)["run"]["info"]["run_id"]
        values = [{"key": key, "value": value[:LONGEST_PARAMETER]} for key, value in self._settings.items()]
        for start in range(0, len(values), MOST_PARAMETERS):
            batch = {"run_id": self._run, "params": values[start : start + MOST_PARAMETERS]}
            self._server.post("runs/log-batch", batch)

    def send(self, records: Sequence[Record]) -> None:
        metrics = [
            {"key": tag, "value": _number(value), "timestamp": int(record.time * 1000), "step": record.step}
            for record in records
            for tag, value in record.values.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            batch = {"run_id": self._run, "metrics": metrics[start : start + MOST_METRICS]}
            self._server.post("runs/log-batch", batch)

    def close(self, completed: bool) -> None:
        status = "FINISHED" if completed else "FAILED"
        self._server.post("runs/update", {"run_id": self._run, "status": status, "end_time": _now()})

    def _find_experiment(self) -> str:
        try:
            name = urllib.parse.quote(self._experiment)
            found = self._server.get(f"experiments/get-by-name?experiment_name={name}")
            return str(found["experiment"]["experiment_id"])
        except ServerError as error:
            if error.status != 404:
                raise
        return str(self._server.post("experiments/create", {"name": self._experiment})["experiment_id"])


class ServerError(RuntimeError):
    """The server refused, with that status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere, where the login would go along."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class Server:
    """Talks to a tracking server; again and again for a while, where it does not answer."""

    def __init__(self, uri: str, environment: Mapping[str, str]) -> None:
        self._root = f"{without_login(uri).rstrip('/')}/api/2.0/mlflow"
        self._headers = {"Content-Type": "application/json"}
        login = login_of(uri)
        if login is None and "MLFLOW_TRACKING_USERNAME" in environment:
            login = environment["MLFLOW_TRACKING_USERNAME"], environment.get("MLFLOW_TRACKING_PASSWORD", "")
        if login is not None:
            self._headers["Authorization"] = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"
        elif "MLFLOW_TRACKING_TOKEN" in environment:
            self._headers["Authorization"] = f"Bearer {environment['MLFLOW_TRACKING_TOKEN']}"
        self._opener = urllib.request.build_opener(_StayHere())

    def get(self, path: str) -> dict[str, Any]:
        """Ask for something."""
        return self._call(path, None)

    def post(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Tell something; metrics that arrive twice count once."""
        return self._call(path, json.dumps(content).encode())

    def _call(self, path: str, body: bytes | None) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._root}/{path}", body, self._headers)
        deadline, pause = time.monotonic() + TRY_S, 1.0
        while True:
            try:
                with self._opener.open(request, timeout=ANSWER_S) as answer:
                    return dict(json.loads(answer.read() or b"{}"))
            except urllib.error.HTTPError as error:
                said = error.read(1000).decode(errors="replace")
                trouble = ServerError(f"{self._root}/{path} answers {error.code}: {said}", error.code)
                if error.code < 500 and error.code != 429:
                    raise trouble from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                trouble = ServerError(f"{self._root}/{path}: {error}", 0)
            if time.monotonic() + pause > deadline:
                raise trouble
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def _now() -> int:
    return int(time.time() * 1000)


def _number(value: float) -> float | str:
    """A number as the interface takes it: JSON has no infinity."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
