"""The chaos suite: real nodes, real clients, faults from a seeded schedule, the audit's verdict.

    scenario + seed + options ──► schedule        plan.py, scenarios.py    pure
                                      │
    stage: nodes, network, disks,     ▼
           clocks               ◄── nemeses       stage.py, network.py, … , nemeses/
    nodes: timerd on disks that can fail          faulty_timerd.py, disk_faults.py
                                      │
    workloads ─► histories            ▼
    heal, drain, stop, audit ◄──── the run        suite_run.py

All records of a run lie in its folder (chaos/history/history.py) before the audit starts. The audit
reads only this folder and imports nothing from this package.
"""
