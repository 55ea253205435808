"""SGLang plugin with which a decode server takes local append-prefills.

SGLang calls :func:`register` in each of its processes (entry point group
``sglang.srt.plugins``). Without ``PPD_ENABLE=1`` it changes nothing, except that it installs the
CPU kernels in a process that was started through the CPU launcher.
"""

from __future__ import annotations


def register() -> None:
    """Check every hook target, then register all hooks, or end the process.

    SGLang logs an ``Exception`` of a plugin and starts without it. A server with half
    of the hooks would corrupt its KV accounting. SGLang does not catch ``SystemExit``,
    so the server refuses to start instead.

    Raises:
        SystemExit: an option is wrong, or a target is missing or has another signature.
    """
    import os

    from ppd.errors import ConfigError
    from sglang_patches.cpu import stand_ins
    from sglang_patches.settings import read_settings

    try:
        if stand_ins.is_installed():
            from sglang_patches.cpu import adapters, controller, kernels, speculation, transfer
            from sglang_patches.engines import engine

            adapters.install()
            controller.install()
            kernels.install()
            transfer.install()
            if engine().speculative_algorithms:
                speculation.install()
        if read_settings(os.environ) is None:
            return
        from sglang_patches import hooks, native
        from sglang_patches.engines import engine
        from sglang_patches.targets import register_all

        if native.engine_takes_local_prefills():
            register_all(native.HOOKS)
        else:
            engine()  # refuses a version that the hooks were not written against
            register_all(hooks.HOOKS)
    except ConfigError as error:
        raise SystemExit(f"sglang-ppd: {error}") from error
    except Exception as error:  # process edge: see above
        raise SystemExit(f"sglang-ppd: could not be loaded: {error!r}") from error
