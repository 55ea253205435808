"""What images, audio and video count as, by real files."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import wave
import zlib
from typing import Any

import orjson
import pytest
from PIL import Image

from ppd.errors import RequestError
from ppd.forecast import Forecast
from ppd.image_size import image_size
from ppd.media import Media, MediaKind
from ppd.prefix import hash_messages
from router.intake.inbound import Endpoint, Inbound, Served
from router.intake.requests import parse


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of noise, by hand: so the size is not what an imaging library reads back."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    rng = random.Random(seed)
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(rows, 1)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def picture(form: str, width: int, height: int, **options: Any) -> bytes:
    noise = random.Random(0).randbytes(3 * width * height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(file, form, **options)
    return file.getvalue()


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(b"\0\0" * round(16_000 * seconds))
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def image_part(data: bytes, mime: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{encoded(data)}"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def read(endpoint: Endpoint, body: dict[str, Any]) -> Inbound:
    return parse(endpoint, orjson.dumps(body), "", Served(("m",)))


FILES = {
    "png": png(321, 123),
    "png of a library": picture("PNG", 321, 123),
    "jpeg": picture("JPEG", 321, 123, quality=95),
    "progressive jpeg": picture("JPEG", 321, 123, progressive=True),
    "jpeg with a profile and a comment": picture(
        "JPEG", 321, 123, icc_profile=bytes(200_000), comment=b"c" * 60_000
    ),
    "webp": picture("WEBP", 321, 123),
    "lossless webp": picture("WEBP", 321, 123, lossless=True),
    "extended webp": picture("WEBP", 321, 123, icc_profile=b"p" * 1000),
    "gif": picture("GIF", 321, 123),
}


@pytest.mark.parametrize("name", FILES)
def test_the_size_is_in_the_header(name: str) -> None:
    assert image_size(encoded(FILES[name])) == (321, 123)
    assert image_size("data:;base64," + encoded(FILES[name]), 13) == (321, 123)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_has_a_size_or_none(name: str) -> None:
    text = encoded(FILES[name])
    for end in [*range(0, 200), *range(200, len(text), 9973)]:
        assert image_size(text[:end]) in (None, (321, 123))


@pytest.mark.parametrize(
    "given",
    ["", "!!!!", "ö" * 40, encoded(b"\xff\xd8" + b"\xff" * 1000), encoded(b"\xff\xd8\xff\xe0\0\0"),
     encoded(b"\xff\xd8\xff\xe0\0\2" * 100_000), encoded(png(1, 1).replace(b"\0\0\0\1", bytes(4)))],
    ids=str,
)  # fmt: skip
def test_what_is_no_image_has_no_size(given: str) -> None:
    assert image_size(given) is None


def test_images_are_counted_in_patches_and_not_as_text() -> None:
    big = picture("JPEG", 1000, 700, quality=95)
    assert len(encoded(big)) > 700_000
    inbound = read(
        Endpoint.CHAT,
        {"messages": [chat(text_part("what is this?"), image_part(big, "image/jpeg"))]},
    )
    assert inbound.chain is not None
    assert inbound.chain.total_bytes == len("user" + "what is this?")
    (image,) = inbound.media
    assert (image.kind, image.units) == (MediaKind.IMAGE, 36 * 25)
    assert Forecast().prompt_tokens("chat", inbound.chain.total_bytes, inbound.media) < 1000


@pytest.mark.parametrize(
    ("part", "kind", "units"),
    [
        (image_part(png(1, 1)), MediaKind.IMAGE, 4),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
         MediaKind.UNSIZED_IMAGE, 1),
        (image_part(b"no image" * 1000), MediaKind.UNSIZED_IMAGE, 1),
        ({"type": "image_url", "image_url": {"url": "data:image/png,%89PNG"}},
         MediaKind.UNSIZED_IMAGE, 1),
        ({"type": "input_audio", "input_audio": {"data": encoded(wav(7.5)), "format": "wav"}},
         MediaKind.AUDIO, 7.5),
        ({"type": "audio_url", "audio_url": {"url": "data:;base64," + encoded(bytes(48_000))}},
         MediaKind.AUDIO, 3),
        ({"type": "audio_url", "audio_url": {"url": "http://a.example/b"}},
         MediaKind.UNSIZED_AUDIO, 1),
        ({"type": "video_url", "video_url": {"url": "data:;base64," + encoded(bytes(2**18))}},
         MediaKind.VIDEO, 4),
        ({"type": "video_url", "video_url": {"url": "http://a.example/b"}},
         MediaKind.UNSIZED_VIDEO, 1),
    ],
)  # fmt: skip
def test_each_kind_has_its_unit(part: dict[str, Any], kind: MediaKind, units: float) -> None:
    inbound = read(Endpoint.CHAT, {"messages": [chat(text_part("look"), part)]})
    assert [one.kind for one in inbound.media] == [kind]
    assert inbound.media[0].units == pytest.approx(units, rel=0.01)
    assert inbound.chain is not None
    assert inbound.chain.total_bytes == len("user" + "look")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": "x"},
        {"type": "image_url", "image_url": {"url": 1}},
        {"type": ["image_url"]},
        {"type": None},
        7,
        "image_url",
    ],
)
def test_parts_of_another_form_are_the_engines_to_judge(part: Any) -> None:
    inbound = read(Endpoint.CHAT, {"messages": [chat(text_part("look"), part)]})
    assert inbound.media == ()


def test_the_same_bytes_are_the_same_image() -> None:
    one, two = png(8, 8, seed=1), png(8, 8, seed=2)

    def end(*parts: dict[str, Any]) -> bytes:
        return hash_messages(b"", [chat(*parts)]).end

    assert end(image_part(one)) == end(image_part(one, "image/x-png"))
    assert end(image_part(one)) != end(image_part(two)), "the sizes are equal, the bytes are not"
    assert end(image_part(one), image_part(two)) != end(image_part(two), image_part(one))
    low = image_part(one)
    low["image_url"]["detail"] = "low"
    assert end(low) != end(image_part(one)), "a detail changes the number of patches"


def test_a_later_turn_has_the_media_after_its_prefix() -> None:
    first, second = chat(text_part("a"), image_part(png(280, 280))), chat(image_part(png(56, 56)))
    reply, last = {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}
    chain = hash_messages(b"", [first, reply, second, last])
    after = [[one.units for one in c.media_after] for c in chain.candidates(lambda _: ())]
    assert after == [[], [], [4.0], [4.0]]
    assert hash_messages(b"", [reply, first]).media_ends == (0, 1)


def test_native_requests_have_media_in_fields() -> None:
    image = encoded(png(280, 280))
    plain = read(Endpoint.GENERATE, {"text": "look"})
    seen = read(Endpoint.GENERATE, {"text": "look", "image_data": image})
    again = read(Endpoint.GENERATE, {"text": "look", "image_data": [f"data:;base64,{image}"]})
    other = read(Endpoint.GENERATE, {"text": "look", "image_data": encoded(png(280, 280, 1))})
    made = read(Endpoint.GENERATE, {"text": "look", "image_data": {"format": "processor_output"}})
    ends = {one.chain.end for one in (plain, seen, again, other, made) if one.chain is not None}
    assert len(ends) == 4
    assert [one.units for one in seen.media] == [100.0]
    assert made.media[0].kind is MediaKind.UNSIZED_IMAGE
    photo = encoded(picture("JPEG", 280, 280))
    assert photo.startswith("/9j/"), "which looks like a path"
    assert read(Endpoint.GENERATE, {"text": "a", "image_data": photo}).media[0].units == 100.0
    path = read(Endpoint.GENERATE, {"text": "a", "image_data": "/data/" + "a" * 80 + ".png"})
    assert path.media[0].kind is MediaKind.UNSIZED_IMAGE
    batch = read(Endpoint.GENERATE, {"text": ["a", "b"], "image_data": [[image], [image]]})
    assert (batch.chain, len(batch.media)) == (None, 2)


def test_native_media_that_are_nested_too_deeply_are_refused() -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep} if _ % 2 else [deep]
    raw = b'{"text": "a", "image_data": ' + json.dumps(deep).encode() + b"}"
    with pytest.raises(RequestError, match="cannot be forwarded"):
        parse(Endpoint.GENERATE, raw, "", Served(("m",)))


PATCHES = (Media(MediaKind.IMAGE, 900.0, 1_000_000),)


def test_a_chat_with_images_does_not_shift_the_ratio_of_text() -> None:
    forecast = Forecast()
    for _ in range(50):
        forecast.learn_prompt("chat", 4000, 1000)
        forecast.learn_prompt("chat", 40, 10 + 2700, PATCHES)
    assert forecast.prompt_tokens("chat", 20_000) == 5000
    assert forecast.prompt_tokens("chat", 40, PATCHES) == pytest.approx(2710, rel=0.05)


def test_one_image_is_nearly_enough_and_a_long_text_hardly_matters() -> None:
    forecast = Forecast()
    forecast.learn_prompt("chat", 40, 2710, PATCHES)
    assert forecast.media_tokens(PATCHES) == pytest.approx(2700, rel=0.05)
    before = forecast.media_tokens(PATCHES)
    forecast.learn_prompt("chat", 400_000, 150_000, PATCHES)  # the text was 1.5 times its forecast
    assert forecast.media_tokens(PATCHES) < 3 * before
    for _ in range(200):
        forecast.learn_prompt("chat", 400_000, 50_000, PATCHES)
        forecast.learn_prompt("chat", 40, 2710, PATCHES)
    assert forecast.media_tokens(PATCHES) > 500


def test_kinds_do_not_shift_each_other() -> None:
    forecast = Forecast()
    sound = (Media(MediaKind.AUDIO, 10.0, 1),)
    before = forecast.media_tokens(sound)
    forecast.learn_prompt("chat", 40, 2710, PATCHES)
    assert forecast.media_tokens(sound) == before
