"""Whole clusters in one process, under a virtual clock: the simulator.

    seed ─► Options (the kind of world) ─► World
                                            ├─ Timeline    virtual clock, one queue of events
                                            ├─ Network     delay, loss, duplicates, partitions
                                            ├─ n SimNodes   real core, driver, log, promise file
                                            │    └─ App     a state machine fed with commits
                                            ├─ SimControl  the controllers, over a model of Raft
                                            ├─ Faults      of nodes, disks, clocks and links
                                            └─ Referee     the promises, checked at every step,
                                                           each by a checker with a name

tests/chaos/planted/ has planted bugs, one or more for each checker, and seeds of past defects.

All random values come from the seed: the same seed and commit give the same run.
"""
