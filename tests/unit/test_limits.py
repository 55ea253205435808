"""Which flags of SGLang a decode server with local prefill may have."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from ppd.errors import ConfigError
from sglang_patches.limits import check_flags

USUAL: dict[str, Any] = {
    "disaggregation_decode_enable_radix_cache": True,
    "dp_size": 1,
    "pp_size": 1,
    "tp_size": 1,
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "enable_lora": None,
}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dp_size": 2}, "--dp-size is not supported"),
        ({"attn_dp_size": 2}, "--attn-dp-size is not supported"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM is not supported"),
        ({"disaggregation_decode_enable_radix_cache": False}, "radix-cache is missing"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_flags(SimpleNamespace(**USUAL | given))


def test_a_supported_speculation_is_accepted() -> None:
    given = SimpleNamespace(**USUAL | {"speculative_algorithm": "EAGLE"})
    check_flags(given, frozenset({"EAGLE", "EAGLE3"}))
    with pytest.raises(ConfigError, match="supported: EAGLE3"):
        check_flags(given, frozenset({"EAGLE3"}))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, []),
        ({"enable_lora": False}, []),
        ({"enable_lora": True, "enable_lmcache": True}, ["--enable-lora", "--enable-lmcache"]),
    ],
)
def test_what_was_never_tried_is_listed(
    given: dict[str, Any], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_flags(SimpleNamespace(**USUAL | given))
    messages = [f"local prefill was never tried with {flag}" for flag in told]
    assert [record.message for record in caplog.records] == messages
