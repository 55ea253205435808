"""``ppd-eval compare``: every policy on the same traffic, side by side on real workers.

``config`` says which traffic and which ways, ``drive`` measures, ``verdict`` says from the raw rows
who was better, and how surely.
"""
