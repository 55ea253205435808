"""``ppd-eval sweep``: what each policy costs in every cell of a grid, on real workers.

``config`` has the grid, ``clusters`` the places to measure, ``choice`` the next measurement,
``rows`` the results; ``drive`` runs it. ``eval.table`` makes tables of it.
"""
