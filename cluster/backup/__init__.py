"""Backups of a running cluster: their store, their catalogue, restore and export.

`timerctl backup`, `restore` and `export` begin in `backup_commands.py`. Read `catalogue.py` for the
files of a store, `backup_run.py` for the way of a backup, `restoration.py` for that of a restore.
"""
