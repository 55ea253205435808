"""Searches on a GPU: Triton kernels over state that stays on the card."""
