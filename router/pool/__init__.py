"""The vector-search pool: collections of rows, searched over HTTP."""
