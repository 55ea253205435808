"""Construction of a router's components."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import aiohttp

from ppd.marks import Marks

from ..admin.admin import Admin
from ..admin.operations import Operations
from ..admin.peer_state import PeerLoads, WorkerChanges
from ..answer_cache.cache import AnswerCache
from ..answer_cache.store import AnswerStore
from ..apis.front import Front
from ..apis.passthrough import Passthrough
from ..apis.request_meter import RequestMeter
from ..apis.response_store import ResponseStore, StoredResponses
from ..config.options import RouterConfig, Secrets
from ..config.retrieval import RetrievalConfig
from ..embedder import Embedder
from ..gateway.routing import Routing, Times
from ..intake.catalog import Catalog
from ..intake.keys import KeyRing
from ..intake.objectives import Objectives
from ..intake.parser import RequestParser
from ..intake.rates import Rates
from ..observability.journal import Journal
from ..observability.metrics import Metrics
from ..observability.tracing import Tracing
from ..peers import Peers
from ..retrieval import milvus
from ..retrieval.chroma import ChromaRetriever
from ..retrieval.feedback import Feedback, Totals
from ..retrieval.link_use import LinkUse
from ..retrieval.memory import Memory
from ..retrieval.metrics import RetrievalMetrics
from ..retrieval.milvus import MilvusRetriever
from ..retrieval.retriever import PoolRetriever, Retriever
from ..retrieval.stage import RetrievalStage
from ..serving.handler import RequestHandler
from ..serving.model import ServedModel
from ..shared.sharing import Sharing
from ..wire.client import Upstreams
from ..workers.registry import WorkerRegistry
from .models import Policies, make_models
from .reload import Reloader
from .sharing import make_sharing


@dataclass(frozen=True, slots=True)
class Parts:
    """The components that the server uses.

    Attributes:
        catalog: the models that clients may name.
        front: serves the token path.
        admin: operators' read access.
        operations: operators' changes of workers.
        passthrough: requests that a worker serves unchanged.
        stored_responses: of the Responses API.
        reloader: applies a changed configuration.
        retriever: None without retrieval, as are the next two without their options.
        feedback: reports to the pool.
        answers: the answer cache.
        gateway: None without ``[gateway]``.
        sharing: None without ``[shared]``.
    """

    catalog: Catalog
    front: Front
    admin: Admin
    operations: Operations
    passthrough: Passthrough
    stored_responses: StoredResponses
    reloader: Reloader
    retriever: Retriever | None
    feedback: Feedback | None
    answers: AnswerCache | None
    gateway: Routing | None
    sharing: Sharing | None


def make_parts(
    config: RouterConfig,
    policies: Policies,
    registry: WorkerRegistry,
    journal: Journal,
    upstreams: Upstreams,
    secrets: Secrets,
    tracing: Tracing | None,
    client: aiohttp.ClientSession,
    control: aiohttp.ClientSession,
    peers: Peers | None,
    changes: WorkerChanges,
) -> Parts:
    """Return the components of a router process.

    Args:
        config: of this process.
        policies: that decide, with their tables.
        registry: the workers.
        journal: of decisions.
        upstreams: connections to workers, of the token path.
        secrets: of the configuration.
        tracing: None: no spans.
        client: for requests that a worker serves unchanged, and for the pool.
        control: with short timeouts, for handshakes, probes and peers.
        peers: the other processes on the port, if any.
        changes: of workers, by operators, before this process was started.
    """
    clock = time.monotonic
    metrics, keys = Metrics(), KeyRing(config.tenants, secrets.worker_api_key)
    store = ResponseStore(config.responses_max_bytes, config.session_ttl_s, clock)
    sharing = make_sharing(config, registry, metrics, store)
    models = make_models(config, policies, registry, journal, upstreams, metrics, sharing, clock)
    catalog = Catalog(registry.models, config.encoders)
    handler = RequestHandler(
        parser=RequestParser(keys, Objectives(config), catalog),
        models=models,
        journal=journal,
        metrics=metrics,
        rates=Rates(config.rate, config.tenants, named=keys.closed, metrics=metrics, clock=clock),
        max_resumptions=config.resume_streams,
        max_body_bytes=config.max_body_bytes,
        tracing=tracing,
        clock=clock,
    )
    admin = Admin(
        policy_spec=config.policy,
        roles=frozenset(config.roles),
        models=models,
        registry=registry,
        handler=handler,
        peer_loads=PeerLoads(control, peers),
        journal=journal,
        metrics=metrics,
        sharing=sharing,
        token=secrets.admin_token,
        clock=clock,
    )
    reloader = Reloader(
        config=config,
        secrets=secrets,
        registry=registry,
        handler=handler,
        models=models,
        admin=admin,
        journal=journal,
    )
    for model in models.values():
        model.workers.on_members = partial(reloader.choose_table, model)
    encoders = {"": config.embedding, **config.encoders}
    meter = RequestMeter(handler.charge, handler.undecided)
    passthrough = Passthrough(client, catalog, encoders, lambda: handler.keys, meter)
    responses = None if sharing is None else sharing.responses
    stored_responses = StoredResponses(
        store, control, peers, lambda: handler.keys, meter, responses
    )
    retriever = retrieval = feedback = None
    if config.retrieval is not None:
        retriever = _retriever(config.retrieval, client)
        # The collection has questions of all tenants.
        private = frozenset({config.answer_cache.collection} if config.answer_cache else ())
        retrieval, feedback = _retrieval(
            config.retrieval, retriever, handler, client, metrics, private, registry, models
        )
    answers = None
    if (cache := config.answer_cache) is not None:
        answers = AnswerCache(
            config=cache,
            store=AnswerStore(cache.url, cache.collection, client),
            handler=handler,
            registry=metrics.registry,
            wall_clock=time.time,
            clock=clock,
        )
    front = Front(
        handler, stored_responses, retrieval, answers, secrets.admin_token, config.max_body_bytes
    )
    share = None if sharing is None else sharing.drains.changed
    operations = Operations(registry, config.all_roles, changes, share)
    gateway = None
    if config.gateway is not None:
        gateway = Routing(
            options=config.gateway,
            handler=handler,
            catalog=catalog,
            max_body_bytes=config.max_body_bytes,
            times=Times(
                config.client_request_timeout_s, config.answer_timeout_s, config.idle_timeout_s
            ),
        )
    return Parts(
        catalog,
        front,
        admin,
        operations,
        passthrough,
        stored_responses,
        reloader,
        retriever,
        feedback,
        answers,
        gateway,
        sharing,
    )


def _retrieval(
    config: RetrievalConfig,
    retriever: Retriever,
    handler: RequestHandler,
    client: aiohttp.ClientSession,
    metrics: Metrics,
    private: frozenset[str],
    registry: WorkerRegistry,
    models: Mapping[str, ServedModel],
) -> tuple[RetrievalStage, Feedback | None]:
    retrieval_metrics = RetrievalMetrics(metrics.registry)
    marks = lru_cache(maxsize=1)(Marks)
    stage = RetrievalStage(
        handler=handler,
        config=config,
        retriever=retriever,
        memory=Memory(config.memory_bytes, config.memory_s, time.monotonic),
        marks=lambda: marks(registry.special_tokens),
        metrics=retrieval_metrics,
        private=private,
        clock=time.monotonic,
    )

    if not config.url:  # other servers have no control loop
        return stage, None

    def totals() -> Totals:
        of_models = [model.metrics for model in models.values()]
        bytes_sent = sum(one.bytes_sent.get() or 0 for one in of_models)
        decode_s = sum(one.decode_s for one in of_models)
        decoded_tokens = sum(one.decoded_tokens for one in of_models)
        return Totals(bytes_sent, decode_s, decoded_tokens)

    feedback = Feedback(
        url=config.url,
        interval_s=config.feedback_interval_s,
        link=LinkUse(config.link_bytes_per_s),
        totals=totals,
        client=client,
        clock=time.monotonic,
    )
    return stage, feedback


def _retriever(config: RetrievalConfig, client: aiohttp.ClientSession) -> Retriever:
    """Return the retriever of the configuration.

    Raises:
        WorkerError: the vector database cannot be used.
    """
    if config.chroma is not None:
        store = config.chroma
        return ChromaRetriever(
            store.url,
            tenant=store.tenant,
            database=store.database,
            token=store.token or os.environ.get("PPD_CHROMA_TOKEN", ""),
            client=client,
            embedder=Embedder(store.embeddings_url, store.embeddings_model, client),
        )
    if config.milvus is None:
        return PoolRetriever(config.url, client)
    database = config.milvus
    token = database.token or os.environ.get("PPD_MILVUS_TOKEN", "")
    embedder = Embedder(database.embeddings_url, database.embeddings_model, client)
    return MilvusRetriever(milvus.connect(database.uri, token), embedder, database.text_field)
