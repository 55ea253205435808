"""``python -m sglang_patches.cpu.launch``: ``sglang.launch_server`` on a machine without GPU.

The stand-ins must be in place before the first SGLang import of *every* process of the server.
Most processes are copies of the first one. Those that SGLang spawns run this module again, so the
stand-ins are installed at its top level.
"""

from __future__ import annotations

import multiprocessing

from sglang_patches.cpu import stand_ins

stand_ins.install()


def _fork_children() -> None:
    """Let SGLang fork its scheduler and its detokenizer from this process.

    SGLang spawns them, because CUDA does not survive a fork. Each new interpreter then imports all
    of SGLang again, for some 12 s of a core.
    """
    set_start_method = multiprocessing.set_start_method

    def set_fork(method: str | None, force: bool = False) -> None:
        import torch
        from prometheus_client import values

        if method == "spawn" and not torch.cuda.is_initialized():
            method = "fork"
            # prometheus_client has chosen its kind of values at its import. SGLang has set the
            # folder for the metrics of several processes since then (utils/common.py).
            values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
        set_start_method(method, force)

    multiprocessing.set_start_method = set_fork


def main(*, forks: bool = True) -> None:
    """Run ``sglang.launch_server`` in this process.

    Args:
        forks: whether its further processes are copies of this one; else SGLang spawns them.
    """
    import runpy
    import warnings

    if forks:
        _fork_children()
    with warnings.catch_warnings():
        # SGLang advises `sglang serve`, which has no module that children could run again.
        warnings.filterwarnings("ignore", message=".*sglang serve.*")
        runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
