"""The host side of decoding: requests come in at any time, steps go to the devices, outputs come back by request.

docs/engine.md draws the way of a request.
"""
