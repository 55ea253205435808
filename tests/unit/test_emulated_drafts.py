"""Speculative decoding on an emulated device: rates, outputs of drafts and target, their steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.emulation.drafts import DraftedOutputs, Drafts
from eval.emulation.hooks import step_of
from eval.emulation.model import LETTERS
from eval.profiles.profile import Step, load_profile
from ppd.errors import ConfigError

from .test_emulation import Mode

PROFILE = load_profile("llama-3.1-8b-h100-tp1")


def batch(mode: str, positions: list[int], **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=Mode(mode), positions=torch.tensor(positions), seq_lens_cpu=None, **fields
    )


def runner(*, draft: bool) -> SimpleNamespace:
    config = SimpleNamespace(vocab_size=128, hidden_size=16)
    return SimpleNamespace(is_draft_worker=draft, model_config=config, dtype=torch.bfloat16)


def tokens(output: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    return [int(token) - LETTERS.start for token in output[0].argmax(dim=1)]


def test_drafts_are_parsed() -> None:
    drafts = Drafts.parse("0.8,0.5@0.05")
    assert drafts == Drafts((0.8, 0.5), 0.05)
    assert drafts.steps == 2
    assert drafts.tokens_per_step == pytest.approx(1 + 0.8 + 0.8 * 0.5)
    for wrong in ("0.8,0.5", "0.8,x@0.1", "1.5@0.1", "0.8@2", "@0.1", ""):
        with pytest.raises(ConfigError, match="drafts are RATE"):
            Drafts.parse(wrong)


def test_draft_and_target_agree_where_a_draft_is_accepted() -> None:
    outputs = DraftedOutputs(Drafts((1.0, 0.0, 1.0), 0.1))
    prefill = batch(
        "extend_without_speculative", [0, 1, 2, 0, 1], extend_seq_lens=torch.tensor([3, 2])
    )
    target = outputs.outputs(runner(draft=False), prefill)
    assert tokens(target) == [3, 2]
    assert target[1].shape == (5, 16)
    # A chain after seven tokens, whose eighth is committed: its places are 8, 9 and 10.
    first = outputs.outputs(runner(draft=True), batch("draft_extend_v2", [5, 6]))
    second = outputs.outputs(runner(draft=True), batch("decode", [7]))
    third = outputs.outputs(runner(draft=True), batch("decode", [8]))
    assert first[1].shape == (2, 16)
    assert tokens(first)[1] == 8
    assert tokens(second) == [10]  # 9 would be right
    assert tokens(third) == [10]
    verified = outputs.outputs(runner(draft=False), batch("target_verify", [7, 8, 9, 10]))
    assert tokens(verified) == [8, 9, 10, 11]


def test_a_new_chain_begins_with_the_first_rate() -> None:
    outputs = DraftedOutputs(Drafts((1.0, 0.0), 0.1))
    for _ in range(3):
        assert tokens(outputs.outputs(runner(draft=True), batch("draft_extend_v2", [6]))) == [8]
        assert tokens(outputs.outputs(runner(draft=True), batch("decode", [7]))) == [10]


def test_a_verify_step_computes_all_tokens_of_the_drafts() -> None:
    lengths, ids = torch.tensor([100, 300]), torch.zeros(8)
    verify = batch("target_verify", [], seq_lens=lengths, input_ids=ids)
    assert step_of(verify) == Step((), 2, 400, width=4)
    assert step_of(batch("decode", [], seq_lens=lengths)) == Step((), 2, 400)
    one, four = (PROFILE.step_ms(Step((), 8, 8192, width)) for width in (1, 4))
    assert one < four < 2 * one  # the weights are read once
    wide = Step((), 128, 128 * 1024, width=4)  # more tokens than the table of decodes has
    assert PROFILE.step_ms(wide) > PROFILE.step_ms(Step((), 128, 128 * 1024))
