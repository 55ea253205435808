"""Vector search one graph step at a time: arrays in, arrays out.

It needs the ``pool`` extra.
"""
