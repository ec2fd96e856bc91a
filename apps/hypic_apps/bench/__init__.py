"""Measuring: peers to compare with in the same run."""
