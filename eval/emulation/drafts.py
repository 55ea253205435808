"""Speculative decoding on an emulated device: accept lengths are drawn from given rates.

Drafts and target give one token each, by position: the letter that belongs there, or the next one.
A draft gives the right letter with the rate of its place in the chain. SGLang's own verification
compares the two. So KV, accept lengths and reserved room are what they are on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ppd.errors import ConfigError

from .model import LETTERS

if TYPE_CHECKING:
    import torch

_CERTAIN = 100.0  # a logit, so that any temperature gives this token


class Drafts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What drafts are like.

    Attributes:
        accept_rates: for each draft token of a chain, the probability that it is accepted if all
            before it are.
        share: a draft's forward takes this share of a forward of the target.
    """

    accept_rates: tuple[float, ...]
    share: float

    @classmethod
    def parse(cls, text: str) -> Drafts:
        """Parse accept rates and share, as ``0.8,0.7,0.6@0.05``.

        Raises:
            ConfigError: it has another form, or a value is no share.
        """
        rates, at, share = text.partition("@")
        try:
            found = cls(tuple(float(rate) for rate in rates.split(",")), float(share))
        except ValueError:
            at = ""
        if not at or not all(0 <= value <= 1 for value in (*found.accept_rates, found.share)):
            raise ConfigError(
                f"drafts are RATE,RATE,...@SHARE with numbers from 0 to 1, as 0.8,0.7,0.6@0.05; "
                f"got {text!r}"
            )
        return found

    @property
    def steps(self) -> int:
        """The number of draft tokens of a chain."""
        return len(self.accept_rates)

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a verify step gives."""
        tokens, all_accepted = 1.0, 1.0
        for rate in self.accept_rates:
            all_accepted *= rate
            tokens += all_accepted
        return tokens


class DraftedOutputs:
    """The outputs of target and draft in a worker that speculates."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self._place = 0  # of the next draft step's token in its chain

    def outputs(self, runner: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and hidden states of a forward.

        Args:
            runner: SGLang's ``ModelRunner``.
            batch: its ``ForwardBatch``.
        """
        import torch

        mode, positions = batch.forward_mode, batch.positions
        drafts = runner.is_draft_worker
        hidden_rows = len(positions)
        if mode.is_extend_without_speculative():  # the last token of each sequence
            positions = positions[torch.cumsum(batch.extend_seq_lens, 0) - 1]
            hidden_rows = len(positions) if drafts else hidden_rows
        # A draft reads the token behind its position, so it predicts the one behind that.
        letters = (positions + 1 + drafts) % len(LETTERS)
        if drafts:
            rate = self.drafts.accept_rates[self._next_place(mode)]
            wrong = torch.rand(len(letters), device=letters.device) >= rate
            letters = (letters + wrong) % len(LETTERS)
        config = runner.model_config
        shape = hidden_rows, config.hidden_size
        return (
            _certain(letters + LETTERS.start, config.vocab_size),
            torch.zeros(shape, dtype=runner.dtype, device=letters.device),
        )

    def _next_place(self, mode: Any) -> int:
        """The place in its chain of the token that a draft's forward gives."""
        self._place = self._place + 1 if mode.is_decode() else 0
        return self._place


def _certain(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return logits of which one token is certain, for each row."""
    import torch

    logits = torch.zeros((len(tokens), vocabulary), device=tokens.device)
    return logits.scatter_(1, tokens.long().unsqueeze(1), _CERTAIN)
