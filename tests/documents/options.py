"""The page of options, from the types of the configurations."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from router.admin.docstrings import attributes_of, description_of
from router.cli import make_parser
from router.config.options import RouterConfig, Secrets
from router.pool.cli import make_parser as make_pool_parser
from router.pool.config import PoolConfig
from router.server.reload import RELOADABLE
from sglang_patches.settings import ENABLE, Settings
from sglang_patches.worker import make_parser as make_worker_parser

from .commands import flags_by_name
from .tables import code, sentence, table
from .types import Option, default_words, options_of, structures, toml, type_words

_INTRODUCTION = """\
# Options

`ppd-router --config FILE` and `ppd-pool serve --config FILE` read a TOML file.
A flag replaces the value of the file.
`ppd-router --config FILE --check-config` reports every problem of a file.

"""
_ROUTER = """\
## The router

On SIGHUP the router reads its file again.
It takes up the options that are marked so; the others need a restart.

"""
_SECRETS = """\
### Secrets

A secret that the file does not have is read from an environment variable.

"""
_PLUGIN = """\
## The plugin

The plugin reads environment variables; `ppd-worker` sets them from its flags.

"""


def page() -> str:
    """The page, in Markdown."""
    return "".join([_INTRODUCTION, *_router(), *_pool(), *_plugin()])


def _router() -> Iterator[str]:
    flags = flags_by_name(make_parser())
    yield _ROUTER
    yield _table(RouterConfig, flags, RELOADABLE)
    yield from _tables_of(RouterConfig)
    yield _SECRETS
    names = attributes_of(Secrets)
    rows = [(code(name), code(f"PPD_{name.upper()}"), sentence(names[name])) for name in names]
    yield table(("option", "variable", "meaning"), rows) + "\n"


def _pool() -> Iterator[str]:
    parsers = make_pool_parser()
    yield "## The pool\n\n"
    yield _table(PoolConfig, flags_by_name(parsers, "serve"))
    yield from _tables_of(PoolConfig)


def _plugin() -> Iterator[str]:
    flags = flags_by_name(make_worker_parser())
    meanings = attributes_of(Settings)
    yield _PLUGIN
    rows = [(code(ENABLE), "", "`0`", "`1` enables the plugin; `0` leaves SGLang as it is")]
    for option in options_of(Settings):
        variable = f"PPD_{option.name.upper()}"
        default = "none" if option.default in (None, ()) else code(toml(option.default))
        rows.append(
            (code(variable), flags.get(variable, ""), default, sentence(meanings[option.name]))
        )
    yield table(("variable", "flag", "default", "meaning"), rows)


def _tables_of(root: type[msgspec.Struct]) -> Iterator[str]:
    """Yield a section for every structure in a configuration; equal ones share a section."""
    paths: dict[type, list[str]] = {}
    pending: list[tuple[str, type]] = [("", root)]
    while pending:
        path, kind = pending.pop(0)
        for option in options_of(kind):
            for below, found in structures(option.kind):
                inner = f"{path}{option.name}{below}"
                if found not in paths:
                    pending.append((f"{inner}.", found))
                paths.setdefault(found, []).append(inner)
    for kind, names in paths.items():
        yield f"### {', '.join(code(f'[{name}]') for name in names)}\n\n"
        yield f"{description_of(kind)}\n\n"
        yield _table(kind, {})


def _table(kind: type, flags: dict[str, str], reloaded: tuple[str, ...] = ()) -> str:
    meanings = attributes_of(kind)

    def row(option: Option) -> list[str]:
        meaning = sentence(meanings.get(option.name, ""))
        if option.name in reloaded:
            meaning += " Read again on SIGHUP."
        name = code(option.name) + (f", {flags[option.name]}" if option.name in flags else "")
        return [name, type_words(option.kind), default_words(option), meaning]

    return table(("option", "type", "default", "meaning"), map(row, options_of(kind))) + "\n"
