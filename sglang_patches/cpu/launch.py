"""``python -m sglang_patches.cpu.launch``: ``sglang.launch_server`` on a machine without GPU.

The stand-ins must be in place before the first SGLang import of *every* process
of the server. They are installed at this module's top level, because the spawn
method of ``multiprocessing`` runs the parent's main module again in each child.
"""

from __future__ import annotations

import multiprocessing

from sglang_patches.cpu import stand_ins

stand_ins.install()


def _fork_children() -> None:
    """Start the server's further processes as copies of this one.

    SGLang spawns them: a new interpreter imports all of SGLang once more, for some 12 s of a core,
    in each of at least two. It must do so where a GPU is, because CUDA does not survive a fork.
    """
    set_start_method = multiprocessing.set_start_method

    def set_fork(method: str, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_fork


def main() -> None:
    """Run ``sglang.launch_server`` in this process."""
    import runpy
    import warnings

    _fork_children()
    with warnings.catch_warnings():
        # SGLang advises `sglang serve`, which has no module that children could run again.
        warnings.filterwarnings("ignore", message=".*sglang serve.*")
        runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
