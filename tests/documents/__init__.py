"""The checks of the documents, and the pages that are generated from the code.

``python -m tests.documents check`` is part of ``make check``; ``make reference`` is
``python -m tests.documents write``.
"""
