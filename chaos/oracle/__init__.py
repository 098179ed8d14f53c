"""Replay: what a log says became of every timer, told independently of production (story.py)."""
