"""Nemeses: one module per kind of fault.

`all_nemeses.py` lists them by name. `nemesis.py` defines their protocol.
"""
