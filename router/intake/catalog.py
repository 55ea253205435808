"""The models that clients may name, and the one that a request is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ppd.errors import RequestError

from ..workers.group import ModelWorkers
from .inbound import Served, check_model, unknown_model

_DEFAULT = "default"  # SGLang's name for whatever is served


class ModelCard(msgspec.Struct):
    """A model that the workers serve.

    Attributes:
        id: the name that requests use.
        max_model_len: maximum number of tokens of a conversation; null if not reported.
    """

    id: str
    max_model_len: int | None
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "sglang"


class ModelList(msgspec.Struct):
    """The models that the workers serve."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Catalog:
    """The models of the router.

    Args:
        models: the workers of each model that generates.
        encoders: names of models that only embed, rank, score or classify.
    """

    def __init__(self, models: Sequence[ModelWorkers], encoders: Iterable[str] = ()) -> None:
        self.models = tuple(models)
        self.encoders = tuple(encoders)
        self._only = models[0] if len(models) == 1 else None
        # Of several models the names are configured, and do not change.
        self._by_name = {} if self._only is not None else {one.name: one for one in models}

    def of(self, model: object) -> Served:
        """What the workers serve for a request that names ``model``.

        Raises:
            RequestError: the router does not serve it.
        """
        workers = self._only
        if workers is None:
            workers = self.workers(model)
        else:
            check_model(model, workers.models)
        return Served(workers.models, workers.vocab_size)

    def workers(self, model: object, *, encodes: bool = False) -> ModelWorkers:
        """The workers of the model that a request names.

        A name is that of a model, that of an adapter, or ``MODEL:ADAPTER``. Where two models have
        an adapter of the same name, only the last form names it. A router of one model takes any
        name here.

        Args:
            model: the field of the request.
            encodes: the request may name an encoder, too. It only changes the error.

        Raises:
            RequestError: no model has the name, or there is none and several models are served.
        """
        if self._only is not None:
            return self._only
        if not isinstance(model, str) or model == _DEFAULT:
            message = f"the field model must name one of {', '.join(self._names(encodes))}"
            raise RequestError(message, param="model", code="model_not_named")
        for wanted in (model, model.rpartition(":")[0]):
            if (found := self._by_name.get(wanted)) is not None:
                return found
            with_adapter = [one for one in self.models if wanted in one.models]
            if len(with_adapter) == 1:
                return with_adapter[0]
            if with_adapter:
                choice = " or ".join(f"{one.name}:{wanted}" for one in with_adapter)
                message = f"several models have an adapter {wanted!r}: name {choice}"
                raise RequestError(message, param="model", code="model_not_named")
        raise unknown_model(model, self._names(encodes))

    def _names(self, encodes: bool) -> list[str]:
        names = [name for one in self.models for name in one.models]
        return [*names, *self.encoders] if encodes else names

    def cards(self) -> list[ModelCard]:
        """The models, as ``GET /v1/models`` lists them."""
        cards = [
            ModelCard(name, one.max_model_tokens) for one in self.models for name in one.models
        ]
        return cards + [ModelCard(name, None) for name in self.encoders]
