"""The protocol with its bytes: orders of the core become writes, sends and calls.

The simulator and `shell/` run the same driver.
"""
