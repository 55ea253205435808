"""Evaluation: clusters on this machine, the demo, benchmarks. Relative imports only: the
wheel installs this folder as ``ppd_eval``."""
