"""Tests of chaos/: the simulator, the suite, the workloads and the audit."""
