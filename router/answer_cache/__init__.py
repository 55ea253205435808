"""The answer cache: answers stored in the vector-search pool, found by similar questions."""
