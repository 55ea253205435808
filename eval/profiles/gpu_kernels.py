"""Triton kernels for what lies between the products of a Llama layer, one launch each.

They fuse what serving engines fuse, so that a step reads and writes activations as often as theirs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(residual, update, weight, out, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add ``update`` to ``residual`` and write the RMS norm of the sum; one program per token.

    Args:
        residual: (tokens, WIDTH), read and written.
        update: (tokens, WIDTH).
        weight: (WIDTH,).
        out: (tokens, WIDTH), written.
        epsilon: added to the mean square.
        WIDTH: size of a row.
        BLOCK: WIDTH, rounded up to a power of 2.
    """
    begin = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    row = tl.load(residual + begin + at, mask=there, other=0).to(tl.float32)
    row += tl.load(update + begin + at, mask=there, other=0).to(tl.float32)
    tl.store(residual + begin + at, row, mask=there)
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    normed = row * scale * tl.load(weight + at, mask=there, other=0).to(tl.float32)
    tl.store(out + begin + at, normed, mask=there)


@triton.jit
def rotate_and_store(  # type: ignore[no-untyped-def]
    qkv,
    positions,
    slots,
    cosines,
    sines,
    keys,
    values,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate queries and keys by their positions, and store keys and values in the KV pool.

    One program per token.

    Args:
        qkv: (tokens, HEADS + 2 * KV_HEADS, 2 * HALF); the queries are written.
        positions: (tokens,) int64.
        slots: (tokens,) int64, places in the pool.
        cosines: (positions, HALF) float32.
        sines: (positions, HALF) float32.
        keys: (pool, KV_HEADS, 2 * HALF), written.
        values: (pool, KV_HEADS, 2 * HALF), written.
        HEADS: heads of the queries.
        KV_HEADS: heads of keys, and of values.
        HALF: half the size of a head.
        ROWS: HEADS + 2 * KV_HEADS, rounded up to a power of 2.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    place = token * (HEADS + 2 * KV_HEADS) * 2 * HALF + head * 2 * HALF + at
    there = (head < HEADS + 2 * KV_HEADS) & (at < HALF)
    low = tl.load(qkv + place, mask=there, other=0).to(tl.float32)
    high = tl.load(qkv + place + HALF, mask=there, other=0).to(tl.float32)
    angle = tl.load(positions + token) * HALF + at
    cosine, sine = tl.load(cosines + angle), tl.load(sines + angle)
    rotated_low = low * cosine - high * sine
    rotated_high = high * cosine + low * sine
    query = there & (head < HEADS)
    tl.store(qkv + place, rotated_low, mask=query)
    tl.store(qkv + place + HALF, rotated_high, mask=query)
    stored = tl.load(slots + token) * KV_HEADS * 2 * HALF
    key = there & (head >= HEADS) & (head < HEADS + KV_HEADS)
    of_key = stored + (head - HEADS) * 2 * HALF + at
    tl.store(keys + of_key, rotated_low, mask=key)
    tl.store(keys + of_key + HALF, rotated_high, mask=key)
    value = there & (head >= HEADS + KV_HEADS)
    of_value = stored + (head - HEADS - KV_HEADS) * 2 * HALF + at
    tl.store(values + of_value, low, mask=value)
    tl.store(values + of_value + HALF, high, mask=value)


@triton.jit
def gate(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply SiLU of the first half of each row by its second half.

    Args:
        both: (tokens, 2 * WIDTH).
        out: (tokens, WIDTH), written.
        WIDTH: size of a row of ``out``.
        BLOCK: values per program; the grid is (tokens, WIDTH / BLOCK), rounded up.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < WIDTH
    first = tl.load(both + token * 2 * WIDTH + at, mask=there, other=0).to(tl.float32)
    second = tl.load(both + token * 2 * WIDTH + WIDTH + at, mask=there, other=0).to(tl.float32)
    tl.store(out + token * WIDTH + at, first * tl.sigmoid(first) * second, mask=there)
