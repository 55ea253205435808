"""A cluster without one: cost model, discrete events, the paper's experiments, studies."""
