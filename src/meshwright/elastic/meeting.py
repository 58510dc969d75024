"""The meeting of the machines of a run, from inside: a process beside each supervisor that takes part in it.

It joins torchelastic's rendezvous in the store, agrees with the others on a plan and on causes, and tells its
supervisor who comes, goes or is lost. The first machine of a generation decides for all: whether the run goes on, and
under which strategy.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from meshwright.elastic import quarantine
from meshwright.elastic.budget import Budget
from meshwright.elastic.failure import Failure
from meshwright.elastic.placement import Choice
from meshwright.elastic.ranks import end_with_parent
from meshwright.elastic.rendezvous import END, JsonState, Nodes, check_run, connect, settings_of
from meshwright.elastic.watch_exchange import WatchExchange
from meshwright.errors import ExitCode, UserError
from meshwright.torch_private import RendezvousMember
from meshwright.training.hooks import STOP_SIGNALS

MEETING = "meshwright/meeting"
"""Key of the meeting's state."""
NEWS = "meshwright/news"
"""Key of how much has been posted for the run's events; with a number, of one such thing."""
EXPLAIN_S = 7.0
"""How long machines wait for the cause of a lost connection: a machine that is gone is known to be in less."""

BETWEEN_S = 0.5
"""How long a machine may be in neither list of the state, on its way from one generation to the next."""

Plan = Callable[[list[tuple[str, int]]], Choice]
"""The strategy for machines with these names and ranks."""


@dataclass(frozen=True)
class Seat:
    """What one machine brings to the meeting."""

    nodes: Nodes
    count: int
    """Ranks that it can have."""
    budget: Budget
    plan: Plan
    identity: str
    """A digest of what the run is: a machine with another one is refused."""
    host: str
    supervisor: int
    """Process id of its supervisor."""


def hold_meeting(pipe: Connection, seat: Seat) -> None:
    """The life of the process that holds the meeting."""
    end_with_parent("mw meeting")
    os.setpgrp()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Its handler would open a store of its own, on every address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meeting = _Meeting(pipe, seat)
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


class _End(Exception):
    """The run is over for this machine."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.end = {"code": int(code), "text": text}


class _Meeting:
    """The meeting from inside: questions of the supervisor are methods."""

    def __init__(self, pipe: Connection, seat: Seat) -> None:
        self._pipe, self._seat, self._nodes = pipe, seat, seat.nodes
        self._lock = threading.Lock()
        self._joined: set[Any] = set()
        self._told: dict[str, Any] = {}
        self._generation = -1
        self._exchange: WatchExchange | None = None

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
        if answer is not None:
            self.say({"id": number, **answer})

    def register(self) -> dict[str, Any]:
        """Come to the store: it must serve this run, to the same configuration, and not know this machine too well."""
        self._store = connect(self._nodes.endpoint)
        run = check_run(self._store, self._nodes.endpoint, self._nodes.run_id)
        self._run_id = run["run_id"]
        self._refuse_if_over()
        mine = self._store.compare_set("meshwright/identity", "", self._seat.identity).decode()
        if mine != self._seat.identity:
            raise _End(
                ExitCode.BAD_INPUT,
                f"the run '{self._run_id}' at {self._nodes.endpoint} was started with another configuration than this "
                "machine has; give every machine the same file and settings",
            )
        self._check_quarantine()
        self._settings = settings_of(self._run_id, self._nodes.least, self._nodes.most, self._nodes.join_s)
        self._state = JsonState(self._store, MEETING, self._settings)
        self._member = RendezvousMember(self._settings, self._seat.host, self._store, self._state)
        # The handler's threads change the other one.
        self._seen = JsonState(self._store, MEETING, self._settings)
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
        store.set(f"node/{node}", json.dumps({"host": self._seat.host, "count": self._seat.count}))
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
        # From here on by its place among the ranks.
        node = plan["machines"].index(node)
        first = sum(plan["counts"][:node])
        self._generation = plan["generation"]
        if self._exchange is not None:
            self._exchange.join(self._generation, node, nodes)
        return {
            **plan,
            "node": node,
            "first_rank": first,
            "local": max(0, min(self._seat.count, plan["world"] - first)),
            "prefix": f"{self._run_id}/{plan['generation']}",
        }

    def _decide(self, machines: list[dict[str, Any]]) -> dict[str, Any]:
        """The plan of a generation: its number, its strategy, who takes part; or why there is none."""
        generation = self._store.add("meshwright/generation", 1) - 1
        failures = self._history(generation)
        refusal = self._seat.budget.refusal(failures) if failures else None
        if refusal is not None:
            return {"end": self._close(refusal.exit_code, str(refusal))}
        try:
            choice = self._seat.plan([(machine["host"], machine["count"]) for machine in machines])
        except UserError as error:
            return {"end": self._close(error.exit_code, str(error))}
        order = choice.machines or tuple(range(len(machines)))
        return {
            "generation": generation,
            "choice": choice,
            "world": choice.world,
            "machines": order,
            "counts": [machines[number]["count"] for number in order],
            "hosts": [machines[number]["host"] for number in order],
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
        deadline, out = time.monotonic() + EXPLAIN_S, dict[Any, float]()
        while time.monotonic() < deadline and not self._store.check([cause]):
            now = time.monotonic()
            out = {node: out.get(node, now) for node in self._absent()}
            if lost := [node for node, since in out.items() if now - since > BETWEEN_S]:
                host = min(lost).addr
                told = {**failure, "rank": -1, "host": host, "cause": "machine lost", "consequence": False}
                told["text"] = f"{host} is lost: its ranks no longer answer"
                return {"failure": json.loads(self._store.compare_set(cause, "", json.dumps(told)))}
            time.sleep(0.1)
        if self._store.check([cause]):
            return {"failure": json.loads(self._store.get(cause))}
        return {"failure": json.loads(self._store.compare_set(trouble, "", json.dumps(failure)))}

    def _absent(self) -> set[Any]:
        """Who of this generation's machines neither takes part nor waits to."""
        self._seen.sync()
        state = self._seen.state
        return self._joined - set(state.participants) - state.wait_list - {self._member.node}

    def finish(self, code: int, text: str) -> dict[str, Any]:
        """The run is over for everyone."""
        self._close(code, text)
        quarantine.leave(self._store, self._seat.host, self._seat.supervisor)
        return {"done": True}

    def leave(self) -> dict[str, Any]:
        """This machine goes; the others go on."""
        self._joined = set()
        self._member.stop_heartbeats()
        # Another connection: the one that joins may be waiting.
        self._store = connect(self._nodes.endpoint)
        JsonState(self._store, MEETING, self._settings).remove(self._member.node)
        quarantine.leave(self._store, self._seat.host, self._seat.supervisor)
        return {"done": True}

    def observe(self) -> None:
        """Tell the supervisor who waits to come in, and who of this generation is gone."""
        if not self._joined:
            return
        self._seen.sync()
        state = self._seen.state
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

    def watch(self, folder: str) -> None:
        """Carry what watchdogs tell each other from and to a folder."""
        self._exchange = WatchExchange(self._nodes.endpoint, Path(folder))
        self._exchange.start()

    def post(self, kind: str, facts: dict[str, Any]) -> None:
        """Something that the machine with the run folder should write to the run's events."""
        self._store.set(f"{NEWS}/{self._store.add(NEWS, 1)}", json.dumps({"kind": kind, **facts}))

    def _check_quarantine(self) -> None:
        """Refuse a machine whose agents have died too often in a short time."""
        host = self._seat.host
        deaths = quarantine.enter(self._store, host, self._seat.supervisor, self._nodes)
        if deaths is None:
            return
        text = (
            f"{host} is quarantined: its agent died {deaths} times within "
            f"{self._nodes.quarantine_window_s:g} s (elastic.quarantine_failures, elastic.quarantine_window_s); "
            "find out why before it takes part again"
        )
        self.post("quarantined", {"host": host, "deaths": deaths, "text": text})
        raise _End(ExitCode.QUARANTINED, text)

    def _tick(self) -> None:
        """Tell the supervisor every second that the store answers; through a connection that nobody else uses."""
        told_end = False
        try:
            store = connect(self._nodes.endpoint)
            told_news, late = store.add(NEWS, 0), False
            while True:
                over = store.check([END])
                self.say({"tick": True})
                if over and not told_end:
                    told_end = True
                    self.say({"end": json.loads(store.get(END))})
                count = store.add(NEWS, 0)
                while told_news < count:
                    there = store.check([f"{NEWS}/{told_news + 1}"])
                    if there:
                        self.say({"news": json.loads(store.get(f"{NEWS}/{told_news + 1}"))})
                    elif not late:
                        # Counted and not yet written; who does neither within a second has died in between.
                        late = True
                        break
                    told_news, late = told_news + 1, False
                time.sleep(1.0)
        except (BrokenPipeError, OSError):
            return
        except (RuntimeError, UserError) as error:
            self.say_lost(error)


class _Retry(Exception):
    """A machine was lost while the others agreed."""
