"""One machine's part in a run on several: it meets the others, learns its ranks, and hears who comes, goes or is lost.

The meeting is held by a process of its own, so that a store that does not answer cannot keep the supervisor from its
ranks, and the supervisor stays free of threads and can fork. The two talk in lines of JSON. The first machine of a
generation decides for all: whether the run goes on, and under which strategy.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from meshwright.elastic.budget import Budget
from meshwright.elastic.failure import Failure, RankError
from meshwright.elastic.placement import Choice, Placement
from meshwright.elastic.ranks import Ending, end_with_parent, may_fork
from meshwright.elastic.rendezvous import END, Endpoint, JsonState, StoreError, check_run, connect, settings_of
from meshwright.errors import ExitCode, UserError
from meshwright.lock import is_alive
from meshwright.torch_private import RendezvousMember
from meshwright.training.hooks import STOP_SIGNALS

STORE_S = 8.0
"""How long the store may be silent before it counts as lost."""
SAVE_S = 12.0
"""How long ranks may take to save when the store is lost; where the network is, too, they cannot."""
MEETING = "meshwright/meeting"
"""Key of the meeting's state."""
EXPLAIN_S = 7.0
"""How long machines wait for the cause of a lost connection: a machine that is gone is known to be in less."""
LOST_S = 2.0
"""How long a machine may be out of the meeting while ranks still run as if it were there."""

Plan = Callable[[int], Choice]
"""The strategy for that many ranks."""


@dataclass(frozen=True)
class Nodes:
    """Several machines: how many, and where they meet."""

    least: int
    most: int
    endpoint: Endpoint
    run_id: str | None = None
    join_s: float = 600.0
    quarantine_failures: int = 3
    quarantine_window_s: float = 600.0


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
        self._failure: Failure | None = None
        self._generation = -1
        context: Any = multiprocessing.get_context("fork" if may_fork(device) else "spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, nodes, count, budget, plan, identity, self.host, os.getpid())
        self._process = context.Process(target=_meet, args=arguments, daemon=True)
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
                elif "say" in said:
                    print(f"meshwright: {said['say']}", file=sys.stderr, flush=True)
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


class _End(Exception):
    """The run is over for this machine."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.end = {"code": int(code), "text": text}


def _meet(
    pipe: Connection,
    nodes: Nodes,
    count: int,
    budget: Budget,
    plan: Plan,
    identity: str,
    host: str,
    supervisor: int,
) -> None:
    """The life of the process that holds the meeting."""
    end_with_parent("mw meeting")
    os.setpgrp()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Its handler would open a store of its own, on every address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meeting = _Meeting(pipe, nodes, count, budget, plan, identity, host, supervisor)
    while True:
        try:
            if pipe.poll(0.25):
                meeting.answer(json.loads(pipe.recv_bytes()))
            else:
                meeting.observe()
        except (EOFError, BrokenPipeError):
            os._exit(0)
        except (RuntimeError, RendezvousError) as error:
            meeting.say_lost(error)
            time.sleep(0.5)


class _Meeting:
    """The meeting from inside: questions of the supervisor are methods."""

    def __init__(
        self,
        pipe: Connection,
        nodes: Nodes,
        count: int,
        budget: Budget,
        plan: Plan,
        identity: str,
        host: str,
        supervisor: int,
    ) -> None:
        self._pipe, self._nodes, self._count = pipe, nodes, count
        self._budget, self._plan, self._identity = budget, plan, identity
        self._host, self._supervisor = host, supervisor
        self._lock = threading.Lock()
        self._joined: set[Any] = set()
        self._told: dict[str, Any] = {}
        self._generation = -1

    def say(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._pipe.send_bytes(json.dumps(message).encode())

    def say_lost(self, error: Exception) -> None:
        with suppress(OSError):
            self.say({"lost": f"{type(error).__name__}: {error}".splitlines()[0][:200]})

    def answer(self, question: dict[str, Any]) -> None:
        """Answer a question of the supervisor."""
        if question["do"] == "join":
            # It takes as long as the others take to come; meanwhile this machine may be asked to leave.
            self._joined = set()
            threading.Thread(target=self._answer, args=(question,), daemon=True).start()
        else:
            self._answer(question)

    def _answer(self, question: dict[str, Any]) -> None:
        number = question.pop("id")
        try:
            answer = getattr(self, question.pop("do"))(**question)
        except _End as end:
            answer = {"error": end.end}
        except UserError as error:
            answer = {"error": {"code": int(error.exit_code), "text": str(error)}}
        except (RuntimeError, RendezvousError) as error:
            self.say_lost(error)
            return
        self.say({"id": number, **answer})

    def register(self) -> dict[str, Any]:
        """Come to the store: it must serve this run, to the same configuration, and not know this machine too well."""
        self._store = connect(self._nodes.endpoint)
        run = check_run(self._store, self._nodes.endpoint, self._nodes.run_id)
        self._run_id = run["run_id"]
        self._refuse_if_over()
        mine = self._store.compare_set("meshwright/identity", "", self._identity).decode()
        if mine != self._identity:
            raise _End(
                ExitCode.BAD_INPUT,
                f"the run '{self._run_id}' at {self._nodes.endpoint} was started with another configuration than this "
                "machine has; give every machine the same file and settings",
            )
        self._check_quarantine()
        self._settings = settings_of(self._run_id, self._nodes.least, self._nodes.most, self._nodes.join_s)
        self._state = JsonState(self._store, MEETING, self._settings)
        self._member = RendezvousMember(self._settings, self._host, self._store, self._state)
        threading.Thread(target=self._tick, daemon=True).start()
        return {"launch": run["launch"]}

    def join(self) -> dict[str, Any]:
        """Meet the others, and learn what this machine's ranks are."""
        while True:
            self._refuse_if_over()
            try:
                info = self._member.handler.next_rendezvous()
            except RendezvousClosedError:
                self._refuse_if_over()
                raise _End(ExitCode.FAILED, f"the run '{self._run_id}' is over") from None
            except RendezvousTimeoutError:
                raise _End(
                    ExitCode.PARTITIONED,
                    f"fewer than {self._nodes.least} machines (--nodes) met at {self._nodes.endpoint} in "
                    f"{self._nodes.join_s:g} s (elastic.join_timeout_s)",
                ) from None
            there = set(self._state.state.participants)
            try:
                answer = self._agree(info.store, info.rank, info.world_size)
            except _Retry:
                continue
            self._told, self._joined = {}, there
            return answer

    def _agree(self, store: Any, node: int, nodes: int) -> dict[str, Any]:
        """All machines of a round agree on one plan, which the first of them makes."""
        store.set(f"node/{node}", json.dumps({"host": self._host, "count": self._count}))
        try:
            if node == 0:
                store.wait([f"node/{number}" for number in range(nodes)], timedelta(seconds=20))
                store.set("plan", json.dumps(self._decide([json.loads(store.get(f"node/{n}")) for n in range(nodes)])))
            store.wait(["plan"], timedelta(seconds=30))
            plan = json.loads(store.get("plan"))
        except _End:
            raise
        except RuntimeError as error:
            if "imeout" not in str(error):
                raise
            # A machine was lost in the middle of it; the others meet again.
            raise _Retry from None
        if "end" in plan:
            raise _End(plan["end"]["code"], plan["end"]["text"])
        first = sum(plan["counts"][:node])
        self._generation = plan["generation"]
        return {
            **plan,
            "node": node,
            "first_rank": first,
            "local": max(0, min(self._count, plan["world"] - first)),
            "prefix": f"{self._run_id}/{plan['generation']}",
        }

    def _decide(self, machines: list[dict[str, Any]]) -> dict[str, Any]:
        """The plan of a generation: its number, its strategy, who takes part; or why there is none."""
        generation = self._store.add("meshwright/generation", 1) - 1
        failures = self._history(generation)
        refusal = self._budget.refusal(failures) if failures else None
        if refusal is not None:
            return {"end": self._close(refusal.exit_code, str(refusal))}
        counts = [machine["count"] for machine in machines]
        try:
            choice = self._plan(sum(counts))
        except UserError as error:
            return {"end": self._close(error.exit_code, str(error))}
        return {
            "generation": generation,
            "choice": choice,
            "world": choice.world,
            "counts": counts,
            "hosts": [machine["host"] for machine in machines],
        }

    def _history(self, generation: int) -> list[Failure]:
        """What went wrong in earlier generations."""
        found = []
        for number in range(generation):
            for kind in ("cause", "trouble"):
                if self._store.check([f"meshwright/{kind}/{number}"]):
                    found.append(Failure(**json.loads(self._store.get(f"meshwright/{kind}/{number}"))))
                    break
        return found

    def explain(self, failure: dict[str, Any]) -> dict[str, Any]:
        """The cause of a failure that all machines agree on: the first that is no consequence of another."""
        cause, trouble = (f"meshwright/{kind}/{failure['generation']}" for kind in ("cause", "trouble"))
        if not failure["consequence"]:
            return {"failure": json.loads(self._store.compare_set(cause, "", json.dumps(failure)))}
        deadline = time.monotonic() + EXPLAIN_S
        while time.monotonic() < deadline and not self._store.check([cause]):
            self._state.sync()
            if missing := self._joined - set(self._state.state.participants) - {self._member.node}:
                still = {node for node in missing if node not in self._state.state.wait_list}
                if still:
                    host = min(still).addr
                    lost = {**failure, "rank": -1, "host": host, "cause": "machine lost", "consequence": False}
                    lost["text"] = f"{host} is lost: its ranks no longer answer"
                    return {"failure": json.loads(self._store.compare_set(cause, "", json.dumps(lost)))}
            time.sleep(0.1)
        if self._store.check([cause]):
            return {"failure": json.loads(self._store.get(cause))}
        return {"failure": json.loads(self._store.compare_set(trouble, "", json.dumps(failure)))}

    def finish(self, code: int, text: str) -> dict[str, Any]:
        """The run is over for everyone."""
        self._close(code, text)
        self._unregister()
        return {"done": True}

    def leave(self) -> dict[str, Any]:
        """This machine goes; the others go on."""
        self._joined = set()
        self._member.stop_heartbeats()
        # Another connection: the one that joins may be waiting.
        self._store = connect(self._nodes.endpoint)
        JsonState(self._store, MEETING, self._settings).remove(self._member.node)
        self._unregister()
        return {"done": True}

    def observe(self) -> None:
        """Tell the supervisor who waits to come in, and who of this generation is gone."""
        if not self._joined:
            return
        self._state.sync()
        state = self._state.state
        gone = sorted(f"{node.addr}/{node.pid}" for node in self._joined - set(state.participants))
        told = {"waiting": bool(state.wait_list), "gone": gone}
        if told != self._told:
            self._told = told
            self.say({"state": told})

    def _close(self, code: int, text: str) -> dict[str, Any]:
        end = json.loads(self._store.compare_set(END, "", json.dumps({"code": int(code), "text": text})))
        self._member.handler.set_closed()
        return dict(end)

    def _refuse_if_over(self) -> None:
        if self._store.check([END]):
            end = json.loads(self._store.get(END))
            text = end["text"] or f"the run '{self._run_id}' at {self._nodes.endpoint} has reached its end"
            raise _End(end["code"], text)

    def _check_quarantine(self) -> None:
        """Refuse a machine whose agents have died too often in a short time."""
        key = f"meshwright/agents/{self._host}"
        now = time.time()
        while True:
            before = self._store.compare_set(key, "", "[]").decode()
            agents = [agent for agent in json.loads(before) if now - agent["time"] < self._nodes.quarantine_window_s]
            for agent in agents:
                agent["died"] = agent["died"] or not is_alive(agent["pid"])
            deaths = sum(agent["died"] for agent in agents)
            quarantined = deaths >= self._nodes.quarantine_failures
            if not quarantined:
                agents.append({"pid": self._supervisor, "time": now, "died": False})
            after = json.dumps(agents)
            if self._store.compare_set(key, before, after).decode() == after:
                break
        if quarantined:
            text = (
                f"{self._host} is quarantined: its agent died {deaths} times within "
                f"{self._nodes.quarantine_window_s:g} s (elastic.quarantine_failures, elastic.quarantine_window_s); "
                "find out why before it takes part again"
            )
            self._store.set(f"meshwright/quarantined/{self._store.add('meshwright/quarantines', 1)}", text)
            raise _End(ExitCode.QUARANTINED, text)

    def _unregister(self) -> None:
        """An agent that ends in peace is not held against its machine."""
        key = f"meshwright/agents/{self._host}"
        while True:
            before = self._store.get(key).decode()
            after = json.dumps([agent for agent in json.loads(before) if agent["pid"] != self._supervisor])
            if self._store.compare_set(key, before, after).decode() == after:
                return

    def _tick(self) -> None:
        """Tell the supervisor every second that the store answers; through a connection that nobody else uses."""
        told_end, told_quarantines = False, 0
        try:
            store = connect(self._nodes.endpoint)
            told_quarantines = store.add("meshwright/quarantines", 0)
            while True:
                over = store.check([END])
                self.say({"tick": True})
                if over and not told_end:
                    told_end = True
                    self.say({"end": json.loads(store.get(END))})
                count = store.add("meshwright/quarantines", 0)
                while told_quarantines < count:
                    told_quarantines += 1
                    self.say({"say": store.get(f"meshwright/quarantined/{told_quarantines}").decode()})
                time.sleep(1.0)
        except (BrokenPipeError, OSError):
            return
        except (RuntimeError, UserError) as error:
            self.say_lost(error)


class _Retry(Exception):
    """A machine was lost while the others agreed."""
