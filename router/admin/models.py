"""The models that the workers serve, as ``GET /v1/models`` lists them."""

from __future__ import annotations

from aiohttp import web

from ..intake.catalog import Catalog, ModelList
from ..intake.inbound import unknown_model
from .responses import json_response


class Models:
    """The routes that list models.

    Args:
        catalog: the models.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to ``app``."""
        app.router.add_get("/v1/models", self.show_all)
        app.router.add_get("/v1/models/{model:.+}", self.show)

    async def show_all(self, request: web.Request) -> web.Response:
        """Return all models."""
        return json_response(ModelList(self._catalog.cards()))

    async def show(self, request: web.Request) -> web.Response:
        """Return one model.

        Raises:
            RequestError: it does not exist.
        """
        model, cards = request.match_info["model"], self._catalog.cards()
        for card in cards:
            if card.id == model:
                return json_response(card)
        raise unknown_model(model, (card.id for card in cards))
