"""The images, audio and video of a request: how large they are, and a digest of their bytes.

A size has a unit of its kind. The tokens of a unit depend on the model (``ppd.forecast``). Nothing
is decoded but headers, and nothing is fetched.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
import orjson
import xxhash

from ppd.image_size import image_size

# Common vision towers make one token of 28 x 28 pixels (Qwen2-VL's paper, 2.1).
_PATCH_PIXELS = 28
_MIN_PATCHES, _MAX_PATCHES = 4, 16384  # models scale what is smaller or larger (Qwen2-VL, 2.1)
_MP3_BYTES_PER_S = 16_000.0  # 128 kbit/s
_WAV_HEAD_BYTES = 44
_VIDEO_BLOCK_BYTES = 65_536.0
_MAX_AUDIO_S, _MAX_VIDEO_BLOCKS = 3600.0, 256.0


class MediaKind(StrEnum):
    """A kind of media, each with its own unit and its own tokens per unit.

    The unit is a patch of 28 x 28 pixels, a second, and 64 KiB of the video file. Media that
    the router has no size of, as behind a URL, are of a kind of their own. Their unit is one.
    """

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    UNSIZED_IMAGE = "unsized_image"
    UNSIZED_AUDIO = "unsized_audio"
    UNSIZED_VIDEO = "unsized_video"


class Media(msgspec.Struct, frozen=True):
    """One image, audio or video.

    Attributes:
        kind: of it.
        units: its size, in the unit of its kind.
        encoded_bytes: its length in the request.
    """

    kind: MediaKind
    units: float
    encoded_bytes: int


_IMAGE: Final = (MediaKind.IMAGE, MediaKind.UNSIZED_IMAGE)
_AUDIO: Final = (MediaKind.AUDIO, MediaKind.UNSIZED_AUDIO)
_VIDEO: Final = (MediaKind.VIDEO, MediaKind.UNSIZED_VIDEO)
# Parts of a message by their type: the kinds, and the name of the field with the media.
_PARTS: Final = {
    "image_url": (_IMAGE, "url"),
    "video_url": (_VIDEO, "url"),
    "audio_url": (_AUDIO, "url"),
    "input_audio": (_AUDIO, "data"),
}
# Fields of ``/generate``.
_FIELDS: Final = {"image_data": _IMAGE, "video_data": _VIDEO, "audio_data": _AUDIO}
MEDIA_FIELDS: Final = frozenset(_FIELDS)


def has_media(parts: Sequence[Any]) -> bool:
    """Return whether a message's content has a part that is no text."""
    for part in parts:
        if type(part) is dict:
            kind = part.get("type")
            if kind != "text" and type(kind) is str and kind in _PARTS:
                return True
    return False


def split(parts: Sequence[Any]) -> tuple[list[Any], int, list[Media]]:
    """Separate the media of a message's content from its text.

    Args:
        parts: the content.

    Returns:
        The parts, each media replaced by the digest of its bytes; the bytes of the text; the media.
    """
    rest: list[Any] = []
    text_bytes, found = 0, []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                text_bytes += len(text.encode(errors="surrogatepass"))
                rest.append(part)
                continue
            case {"type": str(name)} if name in _PARTS:
                kinds, field = _PARTS[name]
                value = part.get(name)
                given = value.get(field) if type(value) is dict else None
                if type(given) is str:
                    found.append(_media(kinds, given))
                    rest.append({**part, name: {**value, field: digest_of(given)}})
                    continue
        rest.append(part)
    return rest, text_bytes, found


def in_fields(body: Mapping[str, Any]) -> tuple[tuple[Media, ...], bytes]:
    """Return the media of a ``/generate`` request, and a digest of all their bytes.

    Args:
        body: the request. Each field has one media, a list of them, or a list of lists.

    Raises:
        orjson.JSONEncodeError: an object is nested too deeply.
    """
    found: list[Media] = []
    hasher = xxhash.xxh3_128()
    for name, kinds in _FIELDS.items():
        for one in _flat(body.get(name)):
            if type(one) is str:
                found.append(_media(kinds, one))
                hasher.update(f"{name} {digest_of(one)}".encode())
            else:  # SGLang's own objects, as features that a processor has made
                encoded = orjson.dumps(one, option=orjson.OPT_SORT_KEYS)
                found.append(Media(kinds[1], 1.0, len(encoded)))
                hasher.update(b"%b %d %b" % (name.encode(), len(encoded), encoded))
    return tuple(found), hasher.digest()


def digest_of(given: str) -> str:
    """Return the digest of a media's bytes, or of its URL.

    A data URL is hashed without its beginning: the same bytes are the same media under any type.
    """
    data = given[_data_start(given) :]
    return xxhash.xxh3_128_hexdigest(data.encode(errors="surrogatepass"))


def _flat(value: Any) -> Iterable[Any]:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, list):
            yield from one
        elif one is not None:
            yield one


def _media(kinds: tuple[MediaKind, MediaKind], given: str) -> Media:
    kind, unsized = kinds
    start = _data_start(given)
    units: float | None = None
    if start or not _is_address(given):
        if kind is MediaKind.IMAGE:
            units = _patches(given, start)
        elif kind is MediaKind.AUDIO:
            units = _audio_s(given, start)
        else:
            file_bytes = 0.75 * (len(given) - start)
            units = min(_MAX_VIDEO_BLOCKS, max(1.0, file_bytes / _VIDEO_BLOCK_BYTES))
    if units is None:
        return Media(unsized, 1.0, len(given))
    return Media(kind, units, len(given))


def _data_start(given: str) -> int:
    """Return the index after the beginning of a data URL in base64; 0 if it is none."""
    if given[:5].lower() != "data:":
        return 0
    comma = given.find(",", 0, 512)
    return comma + 1 if given[:comma].lower().endswith(";base64") else 0


def _is_address(given: str) -> bool:
    """Return whether ``given`` is a URL or a path, not base64. A JPEG file begins with ``/9j/``."""
    if given.startswith("/"):
        return not given.startswith("/9j/")
    return "://" in given[:16] or given.startswith("data:") or len(given) < 64


def _patches(given: str, start: int) -> float | None:
    size = image_size(given, start)
    if size is None:
        return None
    wide, high = (-(-pixels // _PATCH_PIXELS) for pixels in size)
    return float(min(_MAX_PATCHES, max(_MIN_PATCHES, wide * high)))


def _audio_s(given: str, start: int) -> float:
    """Return the length of an audio file, from a WAV header or the usual rate of other formats."""
    file_bytes = 0.75 * (len(given) - start)
    rate = _MP3_BYTES_PER_S
    try:
        head = binascii.a2b_base64(given[start : start + 60])
    except ValueError:  # no base64
        head = b""
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE" and len(head) >= _WAV_HEAD_BYTES:
        rate = int.from_bytes(head[28:32], "little") or rate
    return min(_MAX_AUDIO_S, max(1.0, file_bytes / rate))
