"""Synthetic runs: folders of any size in a run's format, with planted defects.

    python -m tests.chaos.synthetic run/big --timers 100000000 --nodes 3 --plant lost=2,early=1

No cluster takes part. The node logs are real segment files, encoded by the product's own code. The
histories are Parquet. A model that is simpler than any replay (synthetic_world.py) decides the fate
of each timer, so the audit's verdict is known beforehand. `planted.json` names every timer that the
audit must find, with its verdict. All other timers are correct.
"""
