"""The router's configuration: types, files and checks."""
