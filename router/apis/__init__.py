"""What clients may speak: SGLang's own endpoints, and other APIs served as chat completions."""
