"""Searches on a GPU: Triton kernels over state that stays in its memory."""
