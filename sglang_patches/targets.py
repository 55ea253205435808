"""Hooks on SGLang: the check of their targets, and their registration (all hooks or none)."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ppd.errors import ConfigError
from sglang_patches.engines import VERSIONS, Engine, engine, installed

REPOSITORY = "https://github.com/sgl-project/sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One change to a function of SGLang.

    Attributes:
        target: dotted path of the function, as HookRegistry expects it, in the first of the
            versions; ``Engine.moved`` has other paths.
        parameters: the function's parameters in the versions of ``read_against``, as
            ``parameter_names`` returns them; None if the hook passes on any parameters.
        kind: HookType's value. An "around" hook gets the original function first, an "after" hook
            gets its result first.
        function: the function of this package that is registered.
        reason: why the change is needed.
        read_against: the SGLang versions whose source the hook was written against.
        upstream: link to the target's source in the first of these versions, or to the pull
            request that the hook was written for.
    """

    target: str
    parameters: str | None
    kind: Literal["around", "after"]
    function: Callable[..., Any]
    reason: str
    read_against: tuple[str, ...]
    upstream: str

    @property
    def path(self) -> str:
        """The target's dotted path in the installed SGLang."""
        return self.path_in(engine())

    def path_in(self, version: Engine) -> str:
        """The target's dotted path in a version of SGLang."""
        return version.moved.get(self.target, self.target)

    def problem(self, version: Engine) -> str | None:
        """What is wrong with the target in the installed SGLang; None if nothing is.

        Args:
            version: the version that the installed one is read as.
        """
        path = self.path_in(version)
        try:
            target = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            return f"{path} is missing ({error})"
        found = parameter_names(target)
        if self.parameters is not None and found != self.parameters:
            return f"{path} takes ({found}), expected ({self.parameters})"
        return None


def source_link(path: str, line: int) -> str:
    """The link to a line of SGLang 0.5.21's source.

    Args:
        path: the file, relative to ``python/sglang/srt``.
        line: its line, from 1.
    """
    return f"{REPOSITORY}/blob/v0.5.21/python/sglang/srt/{path}#L{line}"


def parameter_names(function: Callable[..., Any]) -> str:
    """The parameters of ``function`` as its source writes them: names and markers only."""
    parameters = inspect.signature(function).parameters.values()
    names = [str(p.replace(annotation=p.empty, default=p.empty)) for p in parameters]
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY:
            if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
                names.insert(i, "*")
            break
    return ", ".join(names)


def register_all(hooks: Sequence[Hook]) -> None:
    """Register ``hooks`` with SGLang, which applies them once all plugins have run.

    Raises:
        ConfigError: a target does not fit. The message names every such target, and no hook is
            registered.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    problems = [problem for hook in hooks if (problem := hook.problem(engine()))]
    if problems:
        raise ConfigError(
            f"the hooks fit SGLang {VERSIONS}, not {installed()}: " + "; ".join(problems)
        )
    for hook in hooks:
        HookRegistry.register(hook.path, hook.function, HookType(hook.kind))


def check_applied(hooks: Sequence[Hook]) -> None:
    """Check that SGLang applied every hook; by itself it only logs a hook that failed.

    Raises:
        ConfigError: a hook was not applied. The message names the targets.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    # The registry's own record: ``__wrapped__`` stands on upstream's decorated functions too.
    left = [hook.path for hook in hooks if hook.path not in HookRegistry._patched]
    if left:
        raise ConfigError(f"SGLang did not apply the hooks on {', '.join(left)}")
