"""One node of the cluster: control plane, log, state plane, API and process.

Read `node/build.py` first. It assembles the others.
"""
