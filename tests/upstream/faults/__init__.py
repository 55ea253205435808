"""Reproductions of faults of SGLang; each module shows one, on whatever SGLang is imported.

``main`` of a module prints one line of JSON: what SGLang did. With ``PPD_ENABLE=1`` SGLang loads
the plugin's hooks before. A module also runs by itself: ``python -m tests.upstream.faults.NAME``.
"""
