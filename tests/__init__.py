"""Tests; the folders mirror the tree they test."""
