"""``ppd-eval sweep``: what each policy costs in every cell of a grid, on real workers.

``config`` says what is wanted, ``clusters`` where it is measured, ``choice`` what is measured
next, ``rows`` what was; ``drive`` does it. Tables are made of it by ``eval.table``.
"""
