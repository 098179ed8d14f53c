"""Commands of the proof: `timerctl audit`, `archive` and `chaos`."""
