"""Reads the width and height of a picture from the header of its file. No pixel is decoded.

The file is the base64 text of a request. Only the characters that hold a header are decoded, so
the cost does not grow with the picture.
"""

from __future__ import annotations

import binascii
from typing import NamedTuple

_MAX_SEGMENTS = 256  # of a JPEG file before its frame: a profile or a preview takes some dozens
_PNG = b"\x89PNG\r\n\x1a\n"
# Markers 0xC0 to 0xCF begin a frame, but for three: tables of codes, and one that is reserved.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class ImageSize(NamedTuple):
    """The size of a picture in pixels; both are 1 or more."""

    width: int
    height: int


def image_size(base64_text: str, start: int = 0) -> ImageSize | None:
    """Return the size of a PNG, JPEG, WebP or GIF file.

    Args:
        base64_text: contains the file as base64, up to the end.
        start: index of the file's first character.

    Returns:
        The size, or None if the header is incomplete or of another format.
    """
    file = _Base64File(base64_text, start)
    head = file.read(0, 30)
    if head.startswith(_PNG):
        size = ImageSize(_big(head[16:20]), _big(head[20:24])) if len(head) >= 24 else None
    elif head.startswith((b"GIF87a", b"GIF89a")):
        size = ImageSize(_little(head[6:8]), _little(head[8:10])) if len(head) >= 10 else None
    elif head.startswith(b"\xff\xd8"):
        size = _of_jpeg(file)
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) == 30:
        size = _of_webp(head)
    else:
        size = None
    return size if size is not None and size.width > 0 and size.height > 0 else None


class _Base64File:
    """A file in base64, of which parts are decoded."""

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self._start = start

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes, or fewer at the end of the file or before what is no base64."""
        first = self._start + offset // 3 * 4
        last = self._start + -(-(offset + count) // 3) * 4
        try:
            decoded = binascii.a2b_base64(self._text[first:last])
        except ValueError:  # also what is not ASCII
            return b""
        return decoded[offset % 3 :][:count]


def _of_jpeg(file: _Base64File) -> ImageSize | None:
    """ISO/IEC 10918-1, B.1 and B.2: segments with a length, until one begins a frame."""
    offset = 2
    for _ in range(_MAX_SEGMENTS):
        segment = file.read(offset, 9)
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        marker = segment[1]
        if marker == 0xFF:  # a fill byte
            offset += 1
        elif marker in _FRAMES:
            return ImageSize(_big(segment[7:9]), _big(segment[5:7]))
        else:
            offset += 2 + _big(segment[2:4])
    return None


def _of_webp(head: bytes) -> ImageSize | None:
    """RFC 9649, 2.5 to 2.7: a lossy, a lossless and an extended file."""
    match head[12:16]:
        case b"VP8 ":
            return ImageSize(_little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF)
        case b"VP8L":
            bits = _little(head[21:25])
            return ImageSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        case b"VP8X":
            return ImageSize(_little(head[24:27]) + 1, _little(head[27:30]) + 1)
        case _:
            return None


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
