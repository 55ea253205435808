"""``ppd-eval table``: decision tables made of a sweep's raw rows, and tools to look at them."""
