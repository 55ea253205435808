"""The HTTP router in front of prefill and decode workers.

Relative imports only: the wheel installs this folder as ``ppd_router``.
"""
