"""The workers: their registry, their state, and the ways in which they join and leave."""
