"""The same faults done to our router and to others."""
