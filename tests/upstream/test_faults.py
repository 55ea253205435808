"""Faults of SGLang: each is shown on SGLang as it is, and gone with what mends it here.

docs/UPSTREAM.md describes each of them. Where the router mends one, the test names its guard.
"""

from __future__ import annotations

import pytest

from ppd.errors import PpdError
from router.intake.requests import _check_vocabulary
from sglang_patches.engines import SUPPORTED, engine

from .conftest import Reproduction

_HOOKS = {"PPD_ENABLE": "1"}
IS_OLD = type(engine()).__name__ == "Engine"


def test_a_transfer_and_a_retracted_request_wait_for_each_other(outcome_of: Reproduction) -> None:
    stuck = {"steps_after_the_transfer": 0, "retracted": 1, "in_transfer": 1}
    assert outcome_of("stand_still") == stuck
    mended = outcome_of("stand_still", **_HOOKS)
    assert mended["steps_after_the_transfer"] > 0
    assert (mended["retracted"], mended["in_transfer"]) == (0, 0)
