"""Vector search measured: against others, in bursts, for a long time."""
