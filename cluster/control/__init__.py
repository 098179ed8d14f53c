"""The control plane: Raft through pysyncobj, membership, and the controller that appoints leaders.

Read `controller.py` and `control_plane.py` first. Only `raft.py` imports pysyncobj.
"""
