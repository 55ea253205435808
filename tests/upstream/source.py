"""``python -m tests.upstream.source``: whether the plugin fits the SGLang that is imported.

``make test-upstream`` runs it before the tests. It prints which SGLang that is. It ends with 1 if
the version is not supported, or if a target of a hook, or a name that the plugin imports, has moved.
"""

from __future__ import annotations

import sys
import warnings

from sglang_patches.cpu import stand_ins


def main() -> None:
    """Check the version and the targets."""
    stand_ins.install()
    warnings.simplefilter("ignore")
    import sglang
    from sglang.version import __version__ as version

    from sglang_patches.engine_check import check_engine
    from sglang_patches.engines import SUPPORTED, VERSIONS
    from sglang_patches.hooks import HOOKS

    print(f"SGLang {version} of {sglang.__path__[0]}")
    lines, moved = check_engine(HOOKS)
    if version not in SUPPORTED:
        print("\n".join(line for line in lines if not line.startswith("ok")))
        sys.exit(f"the plugin fits SGLang {VERSIONS}, this is {version}: no test was run")
    if moved:
        print("\n".join(line for line in lines if line.startswith("MOVED")))
        sys.exit(f"SGLang {version} has moved {moved} of what the plugin uses: no test was run")


if __name__ == "__main__":
    main()
