"""Options of each of several models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from .limits import AdmissionLimits
from .ranges import range_problems


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the router serves a model with.

    Attributes:
        table: path of the model's decision table; "": the shipped one, if any.
        admission: limits on the model's requests; None: ``[admission]``, for this model alone.
        embedding: base URLs of workers that serve the model, if it only embeds, ranks, scores or
            classifies. Prefill, decode and replica workers name their model themselves.
    """

    table: str = ""
    admission: AdmissionLimits | None = None
    embedding: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether prefill, decode or replica workers serve it."""
        return not self.embedding


def model_problems(models: Mapping[str, ModelOptions]) -> Iterator[str]:
    """Yield a message for each option that is wrong, except those of URLs."""
    for name, model in models.items():
        where = f"models.{name}"
        if name in ("", "default"):
            yield f"{where}: no model may have the name {name!r}"
        if model.admission is not None:
            yield from range_problems(model.admission, f"{where}.admission.")
        if not model.generates and (model.table or model.admission is not None):
            yield f"{where}: a model with embedding workers has no table and no admission"
