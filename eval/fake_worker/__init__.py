"""The fake SGLang worker of the benches and chaos tests: real sockets, no computation."""
