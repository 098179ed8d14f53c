"""The oracle: the fate of every timer by the log, told independently of the product.

Read `story.py` first. The audit replays logs with it; the simulator's kept seeds and the synthetic
runs use it, too.
"""
