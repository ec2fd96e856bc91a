"""Framework integrations, tested on a scripted engine."""
