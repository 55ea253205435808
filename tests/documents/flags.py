"""The page of SGLang's flags and of models, from the lists that the plugin applies."""

from __future__ import annotations

from sglang_patches.flags import Verdict
from sglang_patches.limits import PROPERTIES, flags_by_verdict

from .tables import code, sentence, table

_INTRODUCTION = """\
# SGLang's flags

What a decode server with `PPD_ENABLE=1` does with the flags of SGLang that change scheduling or KV.
A refused flag ends the server at its start, and the message has the reason. The log has the flags
that are warned about. Line numbers are SGLang 0.5.23's.

"""
_HEADINGS = {
    Verdict.TRIED: "Tried",
    Verdict.REFUSED: "Refused at the start",
    Verdict.WARNED: "Warned about",
    Verdict.UNAFFECTED: "Not affected",
}


def page() -> str:
    """The page, in Markdown."""
    parts = [f"## {heading}\n\n{_flags(verdict)}" for verdict, heading in _HEADINGS.items()]
    return _INTRODUCTION + "\n".join([*parts, f"## Models and combinations\n\n{_properties()}"])


def _flags(verdict: Verdict) -> str:
    rows = [
        (code(f"--{flag.name}"), flag.only_in or "all", sentence(flag.reason))
        for flag in flags_by_verdict(verdict)
    ]
    return table(("flag", "SGLang", "reason"), rows)


def _properties() -> str:
    rows = [(p.name, p.verdict.value, sentence(p.reason)) for p in PROPERTIES]
    return table(("what", "verdict", "reason"), rows)
