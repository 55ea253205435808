"""The router's options: types, files, checks."""
