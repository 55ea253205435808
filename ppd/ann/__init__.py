"""Vector search one graph step at a time: arrays in, arrays out. Needs the ``pool`` extra."""
