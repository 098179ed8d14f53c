"""Whole clusters in one process, under a virtual clock: the simulator.

    seed ─► Options (what kind of world) ─► World
                                             ├─ Timeline    virtual clock, one queue of events
                                             ├─ Network     delay, loss, duplicates, partitions
                                             ├─ n SimNodes   real core, driver, log, promise file
                                             │    └─ App     a state machine fed with commits
                                             ├─ SimControl  the controllers, over a model of Raft
                                             ├─ Faults      what the seed does to all of them
                                             └─ Referee     the promises, checked at every step,
                                                            each by a checker with a name

tests/chaos/planted/ has the bugs that prove the checkers, and the seeds that found something.

Everything random comes from the seed, so the same seed and commit give the same run.
"""
