"""Tenants apart: whatever they call themselves, their salts and their requests."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.intake.scrub import isolate

NAMES = st.text(st.sampled_from("ab/-%. "), min_size=1, max_size=6)
GIVEN = st.text(st.sampled_from("ab/-%. "), max_size=6)


def isolated(tenant: str, **body: Any) -> dict[str, Any]:
    isolate(body, tenant)
    return body


@given(NAMES, NAMES, GIVEN, GIVEN)
def test_no_tenant_can_take_anothers_salt(one: str, other: str, mine: str, yours: str) -> None:
    salts = [isolated(one, cache_salt=mine), isolated(other, cache_salt=yours)]
    assert (salts[0] == salts[1]) == ((one, mine) == (other, yours))


@given(NAMES, NAMES, GIVEN, GIVEN)
def test_no_tenants_abort_reaches_anothers_requests(
    one: str, other: str, mine: str, yours: str
) -> None:
    """SGLang aborts every request whose id begins with the one that is aborted."""
    rids = [isolated(one, rid=mine)["rid"], isolated(other, rid=[yours])["rid"][0]]
    if one != other:
        assert not any(a.startswith(b) for a, b in permutations(rids, 2))


def test_nor_a_tenants_own() -> None:
    rids = [isolated("team", rid=rid)["rid"] for rid in ("1", "12", "1-1")]
    assert not any(a.startswith(b) for a, b in permutations(rids, 2))


def test_who_has_no_key_is_a_tenant_too() -> None:
    assert isolated("") == {}
    assert isolated("", cache_salt="x", rid="y") == {
        "cache_salt": "anonymous/x",
        "rid": "anonymous/y/",
    }
    assert isolated("alice") == {"cache_salt": "alice"}
