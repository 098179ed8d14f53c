"""One node of the cluster: control plane, log, state plane, API and process.

Read `node/node.py` first. It assembles the others.
"""
