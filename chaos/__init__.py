"""The proof: simulator, chaos suite, audit, live audit and demo.

The product imports nothing from here.
"""
