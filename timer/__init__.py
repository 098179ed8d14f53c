"""The timer engine: the state and the files of one node.

Nothing here reads a clock, a socket or a random source, and nothing here imports another package
of the project. Start with `model/`, then `state/machine.py`.
"""
