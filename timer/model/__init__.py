"""Words of the engine: units, errors, timer ids, columns of timers and the firing order.

Read `units.py` and `columns.py` first. Every other folder imports from here.
"""
