"""Readers of traces of lengths and times: Mooncake, Azure, and sessions.

Files are read in place, never kept. A reader returns conversations, or raises an error with the
file and line that is wrong and what is allowed. Fields that a format has besides those we need are
ignored: the files are other people's.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from ppd.errors import ConfigError

from .conversations import Conversation, PlannedTurn

T = TypeVar("T")
# Bounds beyond any model and any trace, so that a broken number is an error, not a plan.
Tokens = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
TokensOrZero = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]

MOONCAKE_BLOCK_TOKENS = 512
BROKEN_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the last: nesting


class SessionRow(msgspec.Struct, frozen=True):
    """One turn: ``in`` tokens of prompt, the first ``ctx`` of them already in the turn before."""

    s: str | int
    k: Tokens
    prompt: Tokens = msgspec.field(name="in")
    ctx: TokensOrZero
    new: Tokens
    out: Tokens
    t: Seconds | None = None
    gap: Seconds | None = None


class MooncakeRow(msgspec.Struct, frozen=True):
    """FAST'25 release: one request; a block's id stands for all of the prompt up to its end."""

    timestamp: Seconds  # ms
    input_length: Tokens
    output_length: TokensOrZero
    hash_ids: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One turn of a trace; its first ``context_tokens`` are those of the turn before."""

    prompt_tokens: int
    context_tokens: int
    output_tokens: int
    gap_s: float = 0.0


@dataclass(slots=True)
class _Session:
    turns: list[TraceTurn] = field(default_factory=list)
    starts_at_s: float | None = None
    last_s: float = 0.0

    @property
    def held_tokens(self) -> int:
        """By its last turn with its reply."""
        return self.turns[-1].prompt_tokens + self.turns[-1].output_tokens


def conversation_of(turns: Sequence[TraceTurn], starts_at_s: float = 0.0) -> Conversation:
    """Return a conversation with prompts and common beginnings as long as the trace's."""
    planned, held = [], 0
    for turn in turns:
        kept = min(turn.context_tokens, held, turn.prompt_tokens - 1)
        new = turn.prompt_tokens - kept
        keep = None if kept == held else kept
        planned.append(PlannedTurn(new, turn.output_tokens, 0.0, turn.gap_s, keep))
        held = turn.prompt_tokens + turn.output_tokens
    return Conversation(starts_at_s, tuple(planned))


def with_replies(conversation: Conversation) -> Conversation:
    """Put the replies back that a trace has left out of later prompts.

    A turn that cuts its history elsewhere keeps doing so.
    """
    turns: list[PlannedTurn] = []
    prompt = 0  # of the turn before, in the trace
    for turn, context in zip(conversation.turns, conversation.contexts(), strict=True):
        # Of text, the parts of a prompt are counted apart, which changes a token or two.
        is_left_out = turn.keep_tokens is not None and abs(context - prompt) <= prompt // 100
        turns.append(replace(turn, keep_tokens=None) if is_left_out else turn)
        prompt = context + turn.new_tokens
    return replace(conversation, turns=tuple(turns))


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not empty, numbered from 1; ``.gz`` is unpacked.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    some = False
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    some = True
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not some:
        raise ConfigError(f"{path}: is empty, it must hold a row")


def read_rows(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Yield the rows of a JSONL file.

    Raises:
        ConfigError: of :func:`read_lines`, or a line is no such row.
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in read_lines(path):
        try:
            yield number, decoder.decode(line)
        except BROKEN_JSON as error:
            raise ConfigError(f"{path}:{number}: {error}") from error


def read_sessions(path: Path) -> tuple[list[Conversation], bool]:
    """Read rows of sessions whose turns count from 1; return whether their arrivals are known, too.

    A row that goes back to an earlier turn forks: it is held as a conversation of its own.

    Raises:
        ConfigError: a line is broken, or turns are missing.
    """
    sessions: dict[str | int, _Session] = {}
    forks: list[_Session] = []
    timed = True
    for number, row in read_rows(path, SessionRow):
        if row.prompt != row.ctx + row.new:
            raise ConfigError(
                f"{path}:{number}: in is {row.prompt}, it must be ctx + new = {row.ctx + row.new}"
            )
        session = sessions.setdefault(row.s, _Session())
        seen = len(session.turns)
        if row.k > seen + 1:
            raise ConfigError(
                f"{path}:{number}: turn {row.k} of session {row.s} follows turn {seen}: turns "
                "must count from 1, in order"
            )
        turn = TraceTurn(row.prompt, row.ctx, row.out, row.gap or 0.0)
        if row.k <= seen:
            forks.append(_Session([replace(turn, gap_s=0.0)], row.t))
        else:
            session.turns.append(turn)
            if row.k == 1:
                session.starts_at_s = row.t
        timed &= row.k > 1 or row.t is not None
    return _conversations([*sessions.values(), *forks]), timed


def read_mooncake(path: Path, block_tokens: int) -> list[Conversation]:
    """Read conversations from a trace of single requests, by their blocks.

    A request continues the one whose whole blocks it begins with, if it is longer than that with
    its reply. Of several it continues the longest. Blocks that most requests begin with are a
    system prompt, and continue nothing. A second request that continues the same one is a
    conversation of its own.

    Raises:
        ConfigError: a line is broken.
    """
    rows = [row for _, row in _checked(path, block_tokens)]
    shared = _common_blocks([row.hash_ids for row in rows])
    ended: dict[int | str, _Session] = {}  # by the last whole block of its prompt
    sessions: list[_Session] = []
    for row in sorted(rows, key=lambda row: row.timestamp):
        at_s, tokens = row.timestamp / 1e3, row.input_length
        output = max(1, row.output_length)
        found = next(
            (b for b in reversed(row.hash_ids) if b in ended and ended[b].held_tokens < tokens),
            None,
        )
        if found is None:
            session = _Session([TraceTurn(tokens, 0, output)], at_s, at_s)
            sessions.append(session)
        else:
            session = ended.pop(found)
            held = session.held_tokens
            session.turns.append(TraceTurn(tokens, held, output, at_s - session.last_s))
            session.last_s = at_s
        whole_blocks = tokens // block_tokens
        if whole_blocks > shared:
            ended[row.hash_ids[whole_blocks - 1]] = session
    return [
        replace(
            conversation, shared_tokens=min(shared * block_tokens, conversation.turns[0].new_tokens)
        )
        for conversation in _conversations(sessions)
    ]


def _checked(path: Path, block_tokens: int) -> Iterator[tuple[int, MooncakeRow]]:
    for number, row in read_rows(path, MooncakeRow):
        blocks = -(-row.input_length // block_tokens)
        if len(row.hash_ids) != blocks:
            raise ConfigError(
                f"{path}:{number}: {row.input_length} tokens are {blocks} blocks of "
                f"{block_tokens}, hash_ids has {len(row.hash_ids)}"
            )
        yield number, row


def _common_blocks(prompts: Sequence[tuple[int | str, ...]]) -> int:
    """How many blocks more than half of the prompts begin with."""
    common = 0
    while True:
        counts = Counter(prompt[common] for prompt in prompts if len(prompt) > common)
        if len(prompts) < 2 or 2 * max(counts.values(), default=0) <= len(prompts):
            return common
        common += 1


def read_azure(path: Path) -> list[Conversation]:
    """Read Azure's LLM inference traces, one turn each.

    Columns are ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Raises:
        ConfigError: a column is missing, or a line is broken.
    """
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    lines = read_lines(path)
    _, head = next(lines)
    names = head.decode("utf-8", "replace").strip("\ufeff\r\n ").split(",")
    if missing := [column for column in columns if column not in names]:
        raise ConfigError(f"{path}:1: the columns must be {','.join(columns)}; without {missing}")
    places = [names.index(column) for column in columns]
    arrivals: list[tuple[datetime, int, int]] = []
    for number, line in lines:
        fields = line.decode("utf-8", "replace").strip().split(",")
        try:
            at_text, context_text, output_text = (fields[place] for place in places)
            at = datetime.fromisoformat(at_text)
            context, output = int(context_text), int(output_text)
        except IndexError:
            raise ConfigError(
                f"{path}:{number}: must have {len(names)} fields, has {len(fields)}"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if context < 1 or output < 0:
            raise ConfigError(
                f"{path}:{number}: ContextTokens must be at least 1, GeneratedTokens 0, "
                f"got {context} and {output}"
            )
        arrivals.append((at, context, max(1, output)))
    if not arrivals:
        raise ConfigError(f"{path}: has no rows under its header")
    try:
        first = min(at for at, _, _ in arrivals)
    except TypeError as error:
        raise ConfigError(f"{path}: TIMESTAMP has a zone in some rows only") from error
    sessions = (
        _Session([TraceTurn(context, 0, output)], (at - first).total_seconds())
        for at, context, output in arrivals
    )
    return _conversations(sessions)


def _conversations(sessions: Iterable[_Session]) -> list[Conversation]:
    """In order of their beginnings, the first at 0."""
    found = sorted(sessions, key=lambda session: session.starts_at_s or 0.0)
    begin_s = min((session.starts_at_s or 0.0 for session in found), default=0.0)
    return [
        conversation_of(session.turns, (session.starts_at_s or 0.0) - begin_s) for session in found
    ]
