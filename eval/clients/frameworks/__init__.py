"""Programs that use frameworks, each run by an environment that has only that framework.

They are scripts: nothing of this project is imported but ``cases.py``, which lies beside them.
"""
