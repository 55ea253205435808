"""The APIs of the token path: SGLang's own endpoints, and others served as chat completions."""
