"""The models that the workers serve, as ``GET /v1/models`` lists them."""

from __future__ import annotations

from aiohttp import web

from ppd.errors import RequestError

from ..workers.registry import WorkerRegistry
from .responses import json_response
from .schemas import ModelCard, ModelList


class Models:
    """The routes that list models.

    Args:
        registry: the workers.
    """

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to ``app``."""
        app.router.add_get("/v1/models", self.show_all)
        app.router.add_get("/v1/models/{model:.+}", self.show)

    async def show_all(self, request: web.Request) -> web.Response:
        """Return all models."""
        return json_response(ModelList(self._cards()))

    async def show(self, request: web.Request) -> web.Response:
        """Return one model.

        Raises:
            RequestError: it does not exist.
        """
        model = request.match_info["model"]
        for card in self._cards():
            if card.id == model:
                return json_response(card)
        known = ", ".join(card.id for card in self._cards())
        raise RequestError(
            f"the model {model!r} does not exist; available: {known}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def _cards(self) -> list[ModelCard]:
        handshake = self._registry.first
        return [ModelCard(model, handshake.max_model_tokens) for model in handshake.models]
