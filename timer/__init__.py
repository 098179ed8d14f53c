"""Timer engine: what one node knows, and its disk. Imports nothing of ours."""
