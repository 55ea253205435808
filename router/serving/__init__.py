"""One request served: decided, sent to its workers, its answer passed on, learned from."""
