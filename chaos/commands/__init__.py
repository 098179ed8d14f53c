"""Commands of the proof: the demo, and `timerctl audit`, `archive` and `chaos`."""
