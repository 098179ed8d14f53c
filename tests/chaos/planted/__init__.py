"""Planted bugs and kept seeds: proof that the simulator's checkers fail when they should."""
