"""Checks hook targets against the SGLang that is installed, then registers hooks: all or none."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ppd.errors import ConfigError
from sglang_patches.engines import VERSIONS


@dataclass(frozen=True, slots=True)
class Hook:
    """One change to SGLang.

    Attributes:
        target: dotted path of the function, as HookRegistry wants it.
        parameters: its parameters in those versions, as ``parameter_names`` gives them; None if
            the hook passes on whatever they are.
        kind: "around" or "after" (HookType's values).
        function: our side.
        reason: why the change is needed.
    """

    target: str
    parameters: str | None
    kind: str
    function: Callable[..., Any]
    reason: str

    def problem(self) -> str | None:
        """What is wrong with the target in the installed SGLang, or None."""
        try:
            target = pkgutil.resolve_name(self.target)
        except (ImportError, AttributeError) as error:
            return f"{self.target} is missing ({error})"
        found = parameter_names(target)
        if self.parameters is not None and found != self.parameters:
            return f"{self.target} takes ({found}), expected ({self.parameters})"
        return None


def parameter_names(function: Callable[..., Any]) -> str:
    """``function``'s parameters as they are written in its head, names and markers only."""
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
        ConfigError: naming every target that does not fit; then nothing is registered.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.version import __version__ as installed

    problems = [problem for hook in hooks if (problem := hook.problem())]
    if problems:
        raise ConfigError(
            f"the hooks fit SGLang {VERSIONS}, not the installed {installed}: "
            + "; ".join(problems)
        )
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def check_applied(hooks: Sequence[Hook]) -> None:
    """Make sure that SGLang, which only logs a hook that failed, applied all of them.

    Raises:
        ConfigError: naming the targets that were left as they were.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    # The registry's own account: ``__wrapped__`` stands on upstream's decorated functions too.
    left = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if left:
        raise ConfigError(f"SGLang did not apply the hooks on {', '.join(left)}")
