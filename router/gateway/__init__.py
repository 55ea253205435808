"""An endpoint picker: a gateway forwards the requests, the router decides where they go."""
