"""Synthetic runs: folders that look like a run's, of any size, with defects planted in them.

    python -m chaos.synthetic run/big --timers 100000000 --nodes 3 --plant lost=2,early=1

No cluster takes part. The node logs are real segment files, encoded by the product's own code; the
histories are Parquet. What became of every timer follows from a model that is simpler than any
replay (synthetic_world.py), so the audit's verdict is known beforehand: `planted.json` names every
timer that is to be found, with its verdict, and everything else is fine.
"""
