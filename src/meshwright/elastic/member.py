"""This machine in a run on several, as its supervisor sees it: it asks a process of its own, which holds the meeting.

So a store that does not answer cannot keep the supervisor from its ranks, and the supervisor stays free of threads and
can fork. The two talk in lines of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.elastic.budget import Budget
from meshwright.elastic.failure import Failure, RankError
from meshwright.elastic.meeting import EXPLAIN_S, Plan, Seat, hold_meeting
from meshwright.elastic.placement import Choice, Placement
from meshwright.elastic.ranks import Ending, may_fork
from meshwright.elastic.rendezvous import Nodes, StoreError
from meshwright.errors import ExitCode, UserError

STORE_S = 8.0
"""How long the store may be silent before it counts as lost."""
SAVE_S = 12.0
"""How long ranks may take to save when the store is lost; where the network is, too, they cannot."""
LOST_S = 2.0
"""How long a machine may be out of the meeting while ranks still run as if it were there."""


class Member:
    """This machine in the meeting, as the supervisor sees it."""

    alone = False

    def __init__(self, nodes: Nodes, count: int, budget: Budget, plan: Plan, identity: str, device: str) -> None:
        """`identity` is a digest of what the run is: a machine with another one is refused."""
        self.nodes = nodes
        self.host = socket.gethostname()
        self._answers: dict[int, dict[str, Any]] = {}
        self._asked = 0
        self._heard = self._looked = time.monotonic()
        self._lost_since: float | None = None
        self._why_lost = ""
        self._waiting = False
        self._gone: dict[str, float] = {}
        self._end: dict[str, Any] | None = None
        self._news: list[dict[str, Any]] = []
        self._generation = -1
        context: Any = multiprocessing.get_context("fork" if may_fork(device) else "spawn")
        self._pipe, theirs = context.Pipe()
        seat = Seat(nodes, count, budget, plan, identity, self.host, os.getpid())
        self._process = context.Process(target=hold_meeting, args=(theirs, seat), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.launch = str(self._ask({"do": "register"}, 60.0)["launch"])
        except BaseException:
            self.close()
            raise

    def join(self, failure: Failure | None, cancelled: Callable[[], bool]) -> Placement | None:
        """The next generation; None when this machine is asked to stop meanwhile."""
        self._check_store()
        self._waiting, self._gone = False, {}
        number = self._put({"do": "join"})
        while (answer := self._answer(number)) is None:
            if cancelled():
                return None
        self._generation = answer["generation"]
        return Placement(
            world=answer["world"],
            local=answer["local"],
            first_rank=answer["first_rank"],
            generation=answer["generation"],
            host=self.host,
            node=answer["node"],
            hosts=tuple(answer["hosts"]),
            choice=Choice(*answer["choice"]),
            store=(self.nodes.endpoint.host, self.nodes.endpoint.port, answer["prefix"]),
        )

    def explain(self, failure: Failure) -> Failure:
        if self._lost() is not None:
            return failure
        with suppress(RankError, UserError):
            return Failure(**self._ask({"do": "explain", "failure": failure.as_dict()}, EXPLAIN_S + 5)["failure"])
        return failure

    def changes(self) -> Failure | bool:
        self._read()
        now = time.monotonic()
        lost = self._lost()
        if lost is not None:
            if now - lost < SAVE_S:
                return True
            return self._trouble(self.host, "cannot reach the store", self._store_text())
        for name, since in self._gone.items():
            if now - since > LOST_S:
                host = name.split("/")[0]
                mine = name == f"{self.host}/{self._process.pid}"
                text = (
                    f"{host} was taken for lost by the others" if mine else f"{host} is lost: not heard of for seconds"
                )
                return self._trouble(host, "machine lost", text)
        return self._waiting

    def readable(self) -> list[Any]:
        return [self._pipe]

    def over(self) -> Ending | None:
        self._read()
        if self._end is None:
            return None
        if self._end["code"] == ExitCode.DONE:
            return Ending(ExitCode.DONE)
        raise _ended(self._end)

    def watch(self, folder: Path) -> None:
        self._put({"do": "watch", "folder": str(folder)})

    def post(self, kind: str, facts: dict[str, Any]) -> None:
        self._put({"do": "post", "kind": kind, "facts": {"host": self.host, **facts}})

    def news(self) -> list[dict[str, Any]]:
        self._read()
        news, self._news = self._news, []
        return news

    def finish(self, code: int, text: str) -> None:
        with suppress(RankError, UserError):
            self._ask({"do": "finish", "code": code, "text": f"{self.host}: {text}" if text else ""}, 10.0)

    def leave(self) -> None:
        with suppress(RankError, UserError):
            self._ask({"do": "leave"}, 10.0)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _trouble(self, host: str, cause: str, text: str) -> Failure:
        return Failure(
            -1, 0, host, cause, text, generation=self._generation, phase="unknown", time=time.time(), detect_s=0.0
        )

    def _lost(self) -> float | None:
        """Since when the store is lost."""
        now = time.monotonic()
        if now - self._looked > 2.0:
            # Nobody looked, perhaps because this process was stopped: that is not the store's silence.
            self._heard = max(self._heard, now - 2.0)
        self._looked = now
        if self._lost_since is None and now - self._heard > STORE_S:
            self._lost_since = time.monotonic()
            self._why_lost = f"it has been silent for {STORE_S:g} s"
        return self._lost_since

    def _store_text(self) -> str:
        return (
            f"the store at {self.nodes.endpoint} cannot be reached from {self.host} any more ({self._why_lost}): its "
            "machine, its process or the network between is gone. Start `meshwright rendezvous` again, then the same "
            "command on every node: the run goes on from its newest checkpoint"
        )

    def _check_store(self) -> None:
        self._read()
        if self._lost() is not None:
            raise StoreError(self._store_text())

    def _ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The meeting's answer to a question."""
        number = self._put(question)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (answer := self._answer(number)) is not None:
                return answer
        raise StoreError(f"no answer in {limit_s:g} s; {self._store_text()}")

    def _put(self, question: dict[str, Any]) -> int:
        self._asked += 1
        with suppress(OSError):  # What is wrong with the other side is told when its answer is waited for.
            self._pipe.send_bytes(json.dumps({"id": self._asked, **question}).encode())
        return self._asked

    def _answer(self, number: int) -> dict[str, Any] | None:
        """The answer to a question, if it comes in a moment; raises when that is an error or the store is lost."""
        self._pipe.poll(0.1)
        self._read()
        if number not in self._answers:
            self._check_store()
            return None
        answer = self._answers.pop(number)
        if "error" in answer:
            raise _ended(answer["error"])
        return answer

    def _read(self) -> None:
        """Take in what the meeting has said."""
        try:
            while self._pipe.poll():
                said = json.loads(self._pipe.recv_bytes())
                self._heard = time.monotonic()
                if "lost" in said:
                    self._lost_since, self._why_lost = self._lost_since or time.monotonic(), said["lost"]
                elif "state" in said:
                    self._waiting = said["state"]["waiting"]
                    self._gone = {name: self._gone.get(name, self._heard) for name in said["state"]["gone"]}
                elif "end" in said:
                    self._end = said["end"]
                elif "news" in said:
                    self._news.append(said["news"])
                elif "id" in said:
                    self._answers[said["id"]] = said
        except (EOFError, OSError):
            self._lost_since, self._why_lost = self._lost_since or time.monotonic(), "the meeting's process has ended"


def _ended(end: dict[str, Any]) -> Exception:
    """What the end of a run, told by another machine, is here."""
    if end["code"] in (ExitCode.FAILED, ExitCode.NO_PROGRESS):
        error: RankError | UserError = RankError(end["text"])
    else:
        error = UserError(end["text"])
    error.exit_code = end["code"]
    return error
