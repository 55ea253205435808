"""The pure core of PPD: values in, decision out. No I/O, no clock, no engine."""

__version__ = "0.1.0"
