"""``python -m sglang_patches.cpu.launch``: ``sglang.launch_server`` on a machine without GPU.

The stand-ins must be in place before the first SGLang import of *every* process
of the server. They are installed at this module's top level, because the spawn
method of ``multiprocessing`` runs the parent's main module again in each child.
"""

from __future__ import annotations

from sglang_patches.cpu import stand_ins

stand_ins.install()


def main() -> None:
    """Run ``sglang.launch_server`` in this process."""
    import runpy
    import warnings

    with warnings.catch_warnings():
        # SGLang advises `sglang serve`, which has no module that children could run again.
        warnings.filterwarnings("ignore", message=".*sglang serve.*")
        runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
