"""A server that takes what an MLflow tracking server takes, in a process of its own: what it was told is in a file.

`python -m tests.e2e.tracking_server FILE [PATH]` prints its port; on the second request for PATH it stops itself, as
SIGSTOP does: connections stay open, and nobody answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ROOT = "/api/2.0/mlflow/"


class Handler(BaseHTTPRequestHandler):
    """Answers of one experiment with any number of runs."""

    runs: list[dict[str, Any]] = []  # noqa: RUF012
    stops = 0

    def do_GET(self) -> None:
        self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST"})

    def do_POST(self) -> None:
        path = self.path.removeprefix(ROOT)
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(sys.argv[1], "a") as file:
            told = {"path": path, "content": content, "authorization": self.headers.get("Authorization")}
            file.write(json.dumps(told) + "\n")
        if sys.argv[2:] == [path]:
            Handler.stops += 1
            if Handler.stops == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
        if path == "experiments/create":
            self._answer(200, {"experiment_id": "1"})
        elif path == "runs/search":
            wanted = content["filter"].split("'")[1]
            self._answer(200, {"runs": [run for run in self.runs if run["tag"] == wanted]})
        elif path == "runs/create":
            run = {"info": {"run_id": f"run-{len(self.runs)}"}, "tag": content["tags"][0]["value"]}
            self.runs.append(run)
            self._answer(200, {"run": run})
        else:
            self._answer(200, {})

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
