"""``ppd-eval compare``: every policy on the same traffic, side by side on real workers.

``config`` has the traffic and the ways, ``drive`` measures them, ``verdict`` compares the raw rows.
"""
