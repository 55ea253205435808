"""One router with its faulty workers, and the requests to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..dialects import CHAT, text_in
from ..fake_worker.fault import Fault, FaultScript, fault_worker
from ..fake_worker.ranks import Ranks
from ..fake_worker.request import Leg
from ..fake_worker.worker import FakeWorker
from ..http_stream import Patience, Reply, connect, http_request

WAIT_S = 5.0  # what has not come until then does not come
SOON_S = 1.0
WORDS = 4


def faulty_workers(
    model: str, decodes: int, ranks: int = 1
) -> tuple[FakeWorker, list[FakeWorker], dict[str, FaultScript]]:
    """Return one prefill worker, some decode workers, and the fault script of each role.

    Args:
        ranks: of each decode worker.
    """
    faults = {"prefill": FaultScript(), "decode": FaultScript(ranks=Ranks())}
    prefill = fault_worker("prefill", model, faults["prefill"])
    decode = [fault_worker("decode", model, faults["decode"]) for _ in range(decodes)]
    for worker in decode:
        worker.dp_size = ranks
    return prefill, decode, faults


@dataclass(slots=True)
class FaultFixture:
    """One router with its workers.

    Attributes:
        faults: the scripts of the workers, by role.
        local: what is asked is a second turn, which our router answers on the decode worker alone.
    """

    port: int
    model: str
    prefill: FakeWorker
    decode: Sequence[FakeWorker]
    faults: Mapping[str, FaultScript]
    local: bool
    asked: int = 0

    @property
    def ranks(self) -> Ranks:
        """The ranks of the decode workers."""
        ranks = self.faults["decode"].ranks
        assert ranks is not None
        return ranks

    @property
    def workers(self) -> tuple[FakeWorker, ...]:
        """All workers."""
        return (self.prefill, *self.decode)

    async def ask_once(
        self,
        messages: Sequence[dict[str, str]] | None = None,
        patience: Patience | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> Reply:
        """Send one request on a new connection."""
        self.asked += 1
        body = {
            "model": self.model,
            "messages": messages or self._opening(),
            "max_tokens": WORDS,
            "stream": True,
            **(fields or {}),
        }
        try:
            link = await connect(self.port)
        except OSError as error:
            return Reply(broken=str(error))
        try:
            request = http_request(CHAT, json.dumps(body).encode())
            return await link.ask(request, deadline_s=WAIT_S, patience=patience)
        finally:
            link.close()

    def _opening(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Question {self.asked}. " + "Tell me more. " * 20}]

    async def ask(
        self,
        faults: dict[str, Fault] | None = None,
        patience: Patience | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> Reply:
        """The turn that counts: the first of its conversation, or where ``local`` the second.

        Args:
            faults: by role, from now on.
            fields: of the request, besides the usual ones.
        """
        messages = await self.second_turn() if self.local else None
        for worker in self.workers:
            worker.legs.clear()
        for role, script in self.faults.items():
            script.fault = (faults or {}).get(role, Fault.NONE)
        return await self.ask_once(messages, patience, fields)

    async def second_turn(self) -> list[dict[str, str]]:
        """The messages of one, when the first has been answered."""
        messages = self._opening()
        first = await self.ask_once(messages)
        return [
            *messages,
            {"role": "assistant", "content": text_in(CHAT, first.values)},
            {"role": "user", "content": "And then?"},
        ]

    def heal(self) -> None:
        """End all faults."""
        for script in self.faults.values():
            script.fault = Fault.NONE

    def legs(self, role: str) -> list[Leg]:
        """Return the requests that the workers of a role have received."""
        return [leg for worker in self.workers if worker.role == role for leg in worker.legs]


async def closed_within_s(fixture: FaultFixture, role: str, since_s: float) -> float | None:
    """Return how long the legs to a role's workers stayed open; None: longer than ``WAIT_S``."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        ended = [leg.given_up_s for leg in fixture.legs(role)]
        if ended and None not in ended:
            return max(0.0, max(s for s in ended if s is not None) - since_s)
        await asyncio.sleep(0.01)
    return None


def describe(reply: Reply) -> str:
    """Describe in a few words what a client received."""
    if reply.status == 0:
        return f"nothing, {reply.broken}" if reply.broken else "nothing"
    if reply.status != 200:
        return f"status {reply.status}"
    if not reply.whole:
        seen = "the head, then nothing" if reply.first_s is None else "part of it"
        return f"{seen} ({reply.broken})"
    if reply.errors:
        return _counted(len(reply.errors), "error event")
    if not reply.body:
        return "an empty 200"
    return "the whole stream" if reply.dones == 1 else "a silent end"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def is_whole(reply: Reply) -> bool:
    """Return whether an answer has all its words, one ``[DONE]`` and no error."""
    words = text_in(CHAT, reply.values).split() if reply.whole else []
    return reply.status == 200 and len(words) == WORDS and reply.dones == 1 and not reply.errors


def reports_error(reply: Reply) -> bool:
    """Return whether an answer is an error, or carries one."""
    return reply.status >= 500 or bool(reply.errors)


def ends_once(reply: Reply) -> bool:
    """One error, behind all events; at most one ``[DONE]``, behind that."""
    values = reply.values
    last = bool(values) and bool(reply.errors) and values[-1].get("error") is not None
    done_last = reply.dones == 0 or reply.body.endswith(b"data: [DONE]\n\n")
    return len(reply.errors) == 1 and last and reply.dones <= 1 and done_last
