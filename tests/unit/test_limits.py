"""Which flags of SGLang, and which models, a decode server with local prefills may have."""

from __future__ import annotations

import logging
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ppd.errors import ConfigError
from sglang_patches.flags import FLAGS, Verdict
from sglang_patches.limits import check_flags, check_properties

USUAL: dict[str, Any] = {
    "disaggregation_decode_enable_radix_cache": True,
    "speculative_algorithm": None,
    **{flag.attribute: flag.default for flag in FLAGS if flag.only_in in (None, "0.5.23")},
}


def check(given: dict[str, Any], version: str = "0.5.23", algorithms: tuple[str, ...] = ()) -> None:
    """Check the usual flags and some others."""
    check_flags(SimpleNamespace(**USUAL | given), version, frozenset(algorithms))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM is not supported"),
        ({"disaggregation_decode_enable_radix_cache": False}, "radix-cache is missing"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend is not supported"),
        ({"disaggregation_decode_host_receive_threshold": 0.5}, "--disaggregation-decode-host"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        check(given)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.verdict is Verdict.REFUSED], ids=str)
def test_each_refused_flag_is_refused_alone_and_by_name(flag: Any) -> None:
    version = flag.only_in or "0.5.23"
    usual = {f.attribute: f.default for f in FLAGS if f.only_in in (None, version)}
    with pytest.raises(ConfigError) as refused:
        check(usual | {flag.attribute: "something"}, version)
    assert str(refused.value) == (
        f"--{flag.name} is not supported with PPD_ENABLE=1: {flag.reason}"
    )


def test_a_flag_has_one_verdict_for_a_version() -> None:
    counted = Counter((flag.name, flag.only_in) for flag in FLAGS)
    assert max(counted.values()) == 1
    everywhere = {name for name, version in counted if version is None}
    assert not everywhere & {name for name, version in counted if version is not None}


def test_a_checksum_is_refused_where_it_covers_decoded_tokens() -> None:
    given = {"disaggregation_enable_kv_checksum": True}
    check(given, "0.5.23")
    with pytest.raises(ConfigError, match="the digest covers decoded tokens"):
        check(given, "0.5.21")


def test_a_supported_speculation_is_accepted() -> None:
    given = {"speculative_algorithm": "EAGLE"}
    check(given, algorithms=("EAGLE", "EAGLE3"))
    with pytest.raises(ConfigError, match="supported: EAGLE3"):
        check(given, algorithms=("EAGLE3",))


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, []),
        ({"enable_eplb": False}, []),
        (
            {"enable_eplb": True, "kv_cache_dtype": "fp8_e4m3"},
            ["--enable-eplb", "--kv-cache-dtype"],
        ),
    ],
)
def test_what_was_never_tried_is_listed(
    given: dict[str, Any], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check(given)
    messages = [record.message.partition(" with local prefill: ")[0] for record in caplog.records]
    assert messages == warned


def scheduler(**given: Any) -> Any:
    """What the check reads of a scheduler of a dense model with full attention."""
    usual: dict[str, Any] = {
        "is_hybrid_swa": False,
        "tp_worker": SimpleNamespace(is_hybrid_swa=False),
        "is_hybrid_ssm": False,
        "tree_cache": SimpleNamespace(supports_mamba=lambda: False),
        "chunked_prefill_size": 2048,
        "truncation_align_size": None,
        "disable_radix_cache": False,
        "use_ngram_embedding": False,
        "require_mlp_sync": False,
        "model_config": SimpleNamespace(is_multimodal=False, attention_arch=None),
    }
    return SimpleNamespace(**usual | given)


ATTENTION: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "prefill_attention_backend": None,
    "disable_chunked_prefix_cache": False,
}


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({}, True),
        ({"attention_backend": "fa3"}, False),
        ({"prefill_attention_backend": "fa3"}, False),
        ({"disable_chunked_prefix_cache": True}, False),
    ],
)
def test_latents_are_not_expanded_by_a_backend_that_cannot(
    given: dict[str, Any], is_refused: bool
) -> None:
    mla = SimpleNamespace(is_multimodal=False, attention_arch=SimpleNamespace(name="MLA"))
    resolved = SimpleNamespace(**ATTENTION | given)
    check_properties(scheduler(), resolved)
    if is_refused:
        with pytest.raises(ConfigError, match="MLA on FlashInfer or FlashMLA"):
            check_properties(scheduler(model_config=mla), resolved)
    else:
        check_properties(scheduler(model_config=mla), resolved)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"is_hybrid_swa": True}, "sliding-window attention"),
        ({"tp_worker": SimpleNamespace(is_hybrid_swa=True)}, "sliding-window attention"),
        ({"is_hybrid_ssm": True}, "Mamba and linear attention"),
        ({"chunked_prefill_size": None}, "chunked prefill that is off"),
        ({"truncation_align_size": 4096}, "prefill aligned to blocks"),
        ({"disable_radix_cache": True}, "a cache without prefixes"),
        ({"use_ngram_embedding": True}, "n-gram embeddings"),
    ],
)
def test_a_model_that_would_fail_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"not supported with PPD_ENABLE=1: {named}"):
        check_properties(scheduler(**given), SimpleNamespace(**ATTENTION))


def test_ranks_that_step_together_decode_without_speculation() -> None:
    ranks = scheduler(require_mlp_sync=True)
    check_properties(ranks, SimpleNamespace(**ATTENTION, speculative_algorithm=None))
    with pytest.raises(ConfigError, match="DP attention with speculation"):
        check_properties(ranks, SimpleNamespace(**ATTENTION, speculative_algorithm="EAGLE"))


def test_a_multimodal_model_is_served(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_properties(scheduler(), SimpleNamespace(**ATTENTION))
        assert not caplog.records
        config = SimpleNamespace(is_multimodal=True, attention_arch=None)
        check_properties(scheduler(model_config=config), SimpleNamespace(**ATTENTION))
    assert "images, audio and video in requests" in caplog.text
