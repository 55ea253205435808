"""The router's parts, put together around its workers."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from functools import lru_cache

import aiohttp

from ppd.arrivals import ArrivalRate
from ppd.backlog import Backlog
from ppd.decision import Policy
from ppd.forecast import Forecast
from ppd.judge import Judge
from ppd.marks import Marks
from ppd.sessions import SessionIndex

from .answer_cache.cache import AnswerCache
from .answer_cache.store import AnswerStore
from .apis.counted import Counted
from .apis.front import Front
from .apis.kept import KeptResponses, Shelf
from .apis.passthrough import Passthrough
from .config import RouterConfig, Secrets
from .embedder import Embedder
from .intake.admission import Admission
from .intake.keys import KeyRing
from .intake.rates import Rates
from .intake.wishes import WishBook
from .operators.admin import Admin
from .operators.operations import Operations
from .operators.others import Changes, Others
from .reload import Reloader
from .retrieval import milvus
from .retrieval.config import RetrievalConfig
from .retrieval.feedback import Feedback, Totals
from .retrieval.memory import Memory
from .retrieval.metrics import RetrievalMetrics
from .retrieval.milvus import MilvusRetriever
from .retrieval.retriever import PoolRetriever, Retriever
from .retrieval.stage import RetrievalStage
from .seeing.journal import Journal
from .seeing.metrics import Metrics
from .seeing.tracing import Tracing
from .serving.dispatch import Dispatcher
from .serving.ledger import Ledger
from .serving.turns import TurnServer
from .siblings import Siblings
from .tables import TableFile
from .wire.client import Upstreams
from .workers.cluster import WorkerPool


@dataclass(frozen=True, slots=True)
class Parts:
    """What clients and operators talk to."""

    front: Front
    admin: Admin
    operations: Operations
    passthrough: Passthrough
    kept: KeptResponses
    reloader: Reloader
    retriever: Retriever | None
    feedback: Feedback | None
    answers: AnswerCache | None


def make_parts(
    config: RouterConfig,
    policy: Policy,
    table: TableFile | None,
    pool: WorkerPool,
    journal: Journal,
    upstreams: Upstreams,
    secrets: Secrets,
    tracing: Tracing | None,
    client: aiohttp.ClientSession,
    control: aiohttp.ClientSession,
    siblings: Siblings | None,
    changes: Changes,
) -> Parts:
    """
    Args:
        changes: of operators, before this process was started.
        client: for what is passed on to a worker as it comes.
        control: with short timeouts.
    """
    clock = time.monotonic
    metrics, arrivals, backlog, forecast = Metrics(), ArrivalRate(), Backlog(), Forecast()
    index = SessionIndex(capacity=config.session_capacity, ttl_s=config.session_ttl_s)
    keys = KeyRing(config.tenants, secrets.worker_api_key)
    admission = Admission(config.admission, pool.has_room, metrics, clock)
    pool.changed = admission.look
    ledger = Ledger(
        index=index,
        policy=policy,
        forecast=forecast,
        journal=journal,
        metrics=metrics,
        clock=clock,
        new_session=lambda: random.getrandbits(48),
    )

    turns = TurnServer(
        pool=pool,
        judge=Judge(
            policy=policy,
            cluster=pool,
            index=index,
            arrivals=arrivals,
            forecast=forecast,
            backlog=backlog,
        ),
        arrivals=arrivals,
        wishes=WishBook(config),
        dispatcher=Dispatcher(
            upstreams=upstreams,
            pool=pool,
            backlog=backlog,
            metrics=metrics,
            clock=clock,
            new_room=lambda: random.getrandbits(63),
            escapes=config.escape_to_decode,
        ),
        ledger=ledger,
        journal=journal,
        metrics=metrics,
        keys=keys,
        rates=Rates(config.rate, config.tenants, named=keys.closed, metrics=metrics, clock=clock),
        admission=admission,
        most_resumptions=config.resume_streams,
        most_body_bytes=config.max_body_bytes,
        tracing=tracing,
        clock=clock,
    )
    admin = Admin(
        policy_spec=config.policy,
        roles=frozenset(config.roles),
        policy=policy,
        table=table,
        pool=pool,
        turns=turns,
        index=index,
        arrivals=arrivals,
        backlog=backlog,
        forecast=forecast,
        admission=admission,
        others=Others(control, siblings),
        journal=journal,
        metrics=metrics,
        token=secrets.admin_token,
        clock=clock,
    )
    reloader = Reloader(
        config=config,
        secrets=secrets,
        pool=pool,
        turns=turns,
        admission=admission,
        ledger=ledger,
        admin=admin,
        journal=journal,
    )
    counted = Counted(turns.charge, turns.undecided)
    passthrough = Passthrough(client, pool, config.embedding, lambda: turns.keys, counted)
    shelf = Shelf(config.responses_max_bytes, config.session_ttl_s, clock)
    kept = KeptResponses(shelf, control, siblings, lambda: turns.keys, counted)
    retriever = retrieval = feedback = None
    if config.retrieval is not None:
        retriever = _retriever(config.retrieval, client)
        # Questions of all tenants are in it.
        private = frozenset({config.answer_cache.collection} if config.answer_cache else ())
        retrieval, feedback = _retrieval(
            config.retrieval, retriever, turns, client, metrics, private, pool
        )
    answers = None
    if (cached := config.answer_cache) is not None:
        answers = AnswerCache(
            config=cached,
            store=AnswerStore(cached.url, cached.collection, client),
            turns=turns,
            registry=metrics.registry,
            wall_clock=time.time,
            clock=clock,
        )
    front = Front(turns, kept, retrieval, answers, secrets.admin_token, config.max_body_bytes)
    operations = Operations(pool, config.all_roles, changes)
    return Parts(
        front, admin, operations, passthrough, kept, reloader, retriever, feedback, answers
    )


def _retrieval(
    config: RetrievalConfig,
    retriever: Retriever,
    turns: TurnServer,
    client: aiohttp.ClientSession,
    metrics: Metrics,
    private: frozenset[str],
    pool: WorkerPool,
) -> tuple[RetrievalStage, Feedback | None]:
    counted = RetrievalMetrics(metrics.registry)
    marks = lru_cache(maxsize=1)(Marks)
    stage = RetrievalStage(
        turns=turns,
        config=config,
        retriever=retriever,
        memory=Memory(config.memory_bytes, config.memory_s, time.monotonic),
        marks=lambda: marks(pool.special_tokens),
        metrics=counted,
        private=private,
        clock=time.monotonic,
    )

    if config.milvus is not None:  # which has no control loop
        return stage, None

    def totals() -> Totals:
        return Totals(metrics.bytes_sent.get() or 0, metrics.decode_s, counted.stalled_s)

    feedback = Feedback(
        url=config.url,
        interval_s=config.feedback_interval_s,
        link_bytes_per_s=config.link_bytes_per_s,
        totals=totals,
        client=client,
        clock=time.monotonic,
    )
    return stage, feedback


def _retriever(config: RetrievalConfig, client: aiohttp.ClientSession) -> Retriever:
    """Raises:
    WorkerError: the vector database cannot be used.
    """
    if config.milvus is None:
        return PoolRetriever(config.url, client)
    its = config.milvus
    token = its.token or os.environ.get("PPD_MILVUS_TOKEN", "")
    embedder = Embedder(its.embeddings_url, its.embeddings_model, client)
    return MilvusRetriever(milvus.connect(its.uri, token), embedder, its.text_field)
