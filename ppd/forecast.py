"""Predictions of lengths that are unknown when a route is decided.

The length of a reply is predicted from the conversation's own replies and those of its tenant.
Both are running means of logarithms, because lengths have long tails. Recent replies count more.
The error of the predictions is measured. The tokens of a prompt are predicted from the bytes of
its text and the sizes of its media. The ratio of each kind is estimated apart, from usage. Chat
templates add tokens that no byte of a message explains, so short prompts have little weight.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from ppd.media import Media, MediaKind

_RECENT = 0.3  # weight of the newest reply in a mean
_MAX_TENANTS = 10_000
_UNKNOWN = 256.0  # predicted tokens of a reply before the first one
_TOKENS_PER_BYTE = 0.25
_MAX_WEIGHT = 16_384  # bytes of a prompt that count for a ratio
_KEPT = 0.98  # weight of the earlier prompts in a ratio, at each new prompt
# The weight of the usual ratio, beside the bytes of many prompts or of one that gave another one.
_PRIOR_OF_MANY, _PRIOR_OF_ONE = 1024, 256
# Tokens of a unit before usage has shown them: of a patch, a second (Qwen2.5-Omni has 25), and
# 64 KiB; then of an image of 900 x 900 pixels, half a minute of audio, and ten seconds of video.
_TOKENS_PER_UNIT = {
    MediaKind.IMAGE: 1.0,
    MediaKind.AUDIO: 25.0,
    MediaKind.VIDEO: 150.0,
    MediaKind.UNSIZED_IMAGE: 1024.0,
    MediaKind.UNSIZED_AUDIO: 750.0,
    MediaKind.UNSIZED_VIDEO: 3000.0,
}
_MAX_STEP = 16.0  # by which one prompt may change a ratio of media


def blend(usual_tokens: float | None, tokens: int) -> float:
    """Update a running mean of reply lengths.

    Args:
        usual_tokens: the mean so far; None before the first reply.
        tokens: length of the new reply.
    """
    if usual_tokens is None:
        return float(max(1, tokens))
    old, new = math.log(usual_tokens), math.log(max(1, tokens))
    return math.exp(old + _RECENT * (new - old))


def further_tokens(text_bytes: int, tokens: int, of_bytes: int) -> int:
    """The predicted tokens of text that follows a known prompt, by the prompt's own ratio.

    All routers of a conversation predict the same.

    Args:
        text_bytes: bytes of the text that follows.
        tokens: of the known prompt.
        of_bytes: bytes of the known prompt's text.
    """
    return round(text_bytes * _ratio(tokens, of_bytes, _PRIOR_OF_ONE))


def _ratio(tokens: float, text_bytes: float, prior_bytes: int) -> float:
    """Tokens per byte, where few bytes have little weight beside the usual ratio."""
    return (tokens + prior_bytes * _TOKENS_PER_BYTE) / (text_bytes + prior_bytes)


class Forecast:
    """Predicts reply lengths by tenant, and the tokens of prompts by what they hold.

    The ratios are of one model, as a router serves only one. The caller keeps the mean of each
    conversation, in its ``Turn``.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, float] = OrderedDict()
        self._text: dict[str, tuple[float, float]] = {}  # recent tokens and bytes of each kind
        self._tokens_per_unit = _TOKENS_PER_UNIT.copy()
        self._seen: set[MediaKind] = set()  # kinds that made up most of a prompt
        self._off: float | None = None

    def prompt_tokens(self, kind: str, text_bytes: int, media: Sequence[Media] = ()) -> int:
        """The predicted tokens of a prompt.

        Args:
            kind: of the prompt.
            text_bytes: bytes of its text.
            media: of the prompt.
        """
        tokens = round(text_bytes * self._tokens_per_byte(kind))
        return tokens + self.media_tokens(media) if media else tokens

    def _tokens_per_byte(self, kind: str) -> float:
        return _ratio(*self._text.get(kind, (0.0, 0.0)), _PRIOR_OF_MANY)

    def media_tokens(self, media: Sequence[Media]) -> int:
        """The predicted tokens of media."""
        return round(sum(one.units * self._tokens_per_unit[one.kind] for one in media))

    def learn_prompt(
        self, kind: str, text_bytes: int, tokens: int, media: Sequence[Media] = ()
    ) -> None:
        """Update the ratios by one prompt: that of its text, or those of its media if it has any.

        Args:
            kind: of the prompt.
            text_bytes: bytes of its text.
            tokens: of the whole prompt, as the engine counted them.
            media: of the prompt.
        """
        if media:
            self._learn_media(media, tokens - self.prompt_tokens(kind, text_bytes), tokens)
            return
        old_tokens, old_bytes = self._text.get(kind, (0.0, 0.0))
        if text_bytes > _MAX_WEIGHT:  # one unusual prompt must not outweigh those of all others
            tokens, text_bytes = round(tokens * _MAX_WEIGHT / text_bytes), _MAX_WEIGHT
        self._text[kind] = (
            _KEPT * old_tokens + tokens,
            _KEPT * old_bytes + text_bytes,
        )

    def _learn_media(self, media: Sequence[Media], media_tokens: int, tokens: int) -> None:
        """Update the ratios of media by the tokens that the text does not explain.

        The error of the text's prediction is in them. So a ratio moves in proportion to the share
        that its kind has of the prompt. Several kinds in one prompt keep their proportion.
        """
        predicted: dict[MediaKind, float] = {}
        for one in media:
            units = one.units * self._tokens_per_unit[one.kind]
            predicted[one.kind] = predicted.get(one.kind, 0.0) + units
        total = sum(predicted.values())
        factor = min(_MAX_STEP, max(1 / _MAX_STEP, media_tokens / total))
        for kind, of_kind in predicted.items():
            share = min(1.0, of_kind * factor / max(1, tokens))
            weight = share * (0.1 if kind in self._seen else 1.0)
            self._tokens_per_unit[kind] *= 1 + weight * (factor - 1)
            if share > 0.5:
                self._seen.add(kind)

    def reply_tokens(
        self, tenant: str, usual_tokens: float | None, max_reply_tokens: int | None
    ) -> int:
        """The predicted tokens of the next reply.

        Args:
            tenant: the tenant of the conversation.
            usual_tokens: running mean of the conversation's replies; None before the first.
            max_reply_tokens: the request's own limit, if it has one.
        """
        of_tenant = self._tenants.get(tenant)
        match usual_tokens, of_tenant:
            case None, None:
                tokens = _UNKNOWN
            case None, known:
                assert known is not None
                tokens = known
            case own, None:
                tokens = own
            case own, known:  # a conversation's few replies weigh as much as its tenant's many
                assert known is not None
                tokens = math.sqrt(own * known)
        if max_reply_tokens is not None:
            tokens = min(tokens, max_reply_tokens)
        return max(1, round(tokens))

    def learn_reply(self, tenant: str, predicted: int | None, tokens: int) -> float | None:
        """Update the predictions by a reply that has ended.

        Returns:
            The factor by which ``predicted`` was off, at least 1; None without a prediction.
        """
        self._tenants[tenant] = blend(self._tenants.get(tenant), tokens)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        if predicted is None:
            return None
        actual = max(1, tokens)
        factor = max(predicted / actual, actual / predicted)
        self._off = factor if self._off is None else self._off + 0.05 * (factor - self._off)
        return factor

    @property
    def typically_off(self) -> float | None:
        """The running mean of the factors that ``learn_reply`` returned; None before the first."""
        return self._off
