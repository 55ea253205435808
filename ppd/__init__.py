"""The pure core of PPD: values in, decisions out, without I/O, clock or engine."""

__version__ = "0.1.0"
