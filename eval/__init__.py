"""Evaluation: the demo, the benches, the studies and the report.

Imports are relative: the wheel installs this package as ``ppd_eval``.
"""
