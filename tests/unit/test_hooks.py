"""The list of hooks: complete entries, and counters that the description has."""

from __future__ import annotations

import re

import pytest

from ppd.contract import WorkerDescription
from sglang_patches import hooks, native
from sglang_patches.engines import ENGINES
from sglang_patches.targets import Hook
from sglang_patches.telemetry import Telemetry


@pytest.mark.parametrize(
    "hook", [*hooks.HOOKS, *native.HOOKS], ids=lambda hook: hook.target.rpartition(".")[2]
)
def test_a_hook_names_its_reason_and_its_source(hook: Hook) -> None:
    assert hook.kind in ("around", "after")
    assert hook.reason
    assert hook.read_against
    assert hook.function.__doc__
    assert re.fullmatch(
        r"https://github\.com/sgl-project/sglang/(blob/v[\d.]+/python/sglang/srt/[\w/]+\.py#L\d+"
        r"|pull/\d+)",
        hook.upstream,
    )


def test_scheduling_hooks_were_read_against_every_supported_version() -> None:
    assert {hook.read_against for hook in hooks.HOOKS} == {tuple(ENGINES)}


def test_the_description_has_a_field_for_each_counter() -> None:
    counters = Telemetry(None).counters()
    assert set(counters) < set(WorkerDescription.__struct_fields__)
