"""A package, so that its cluster ends after the last of its tests."""
