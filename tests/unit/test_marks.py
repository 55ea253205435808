"""Passages: their marks broken up, and replies as their models read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ppd.marks import Marks, unusual
from router.retrieval.memory import Injection, digest_of
from router.serving.resume import with_appended
from sglang_patches.plugin import _special_tokens

SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<start_of_turn>", "▁own", "§")
PIECES = st.lists(
    st.one_of(
        st.sampled_from(SPECIAL),
        st.sampled_from(["<", "|", ">", "im_end", "[", "]", "INST", "/", "s", "<|", "|>"]),
        st.text(max_size=5),
    ),
    max_size=12,
).map("".join)


@given(PIECES)
def test_no_mark_is_left(text: str) -> None:
    broken = Marks(SPECIAL).broken(text)
    assert not any(mark in broken for mark in SPECIAL)
    if "\u200b" not in text and "§" not in text:
        assert broken.replace("\u200b", "") == text, "and nothing else is changed"


def test_only_tokens_that_are_not_split_anyway_are_listed() -> None:
    assert unusual([*SPECIAL, "  ", "<|im_end|>[OWN]"]) == ("§", "▁own")


def test_what_a_worker_tells_of_its_tokenizer() -> None:
    vocabulary = {"[UNK]": 0, "a": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")),
        additional_special_tokens=["[TOOL_CALLS]", "<|im_end|>"],
    )
    tokenizer.add_tokens(["<table>"])  # one token, but text
    assert _special_tokens(tokenizer) == ("[TOOL_CALLS]",)
    assert _special_tokens(None) == ()


@given(st.text(max_size=40), st.lists(st.integers(0, 40), max_size=4), st.text(max_size=5))
def test_what_was_read_aside_goes_back_where_it_was(
    reply: str, places: list[int], aside: str
) -> None:
    asides = tuple((min(at, len(reply)), f"<{aside}>") for at in sorted(places))
    read = with_appended(reply, asides)
    assert len(read) == len(reply) + sum(len(text) for _, text in asides)
    if not asides:
        assert read == reply
        return
    kept = Injection(None, "", (), asides, digest_of(reply[: asides[-1][0]]))
    assert kept.put_back(reply) == read
    assert kept.is_of(reply)
    assert kept.is_of(reply + " and more")
    assert kept.put_back(reply + " and more") == with_appended(reply + " and more", asides)
    other = ("b" if reply.startswith("a") else "a") + reply
    if asides[-1][0]:
        assert not kept.is_of(other)
