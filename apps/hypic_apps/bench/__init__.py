"""Measuring speed: ``hypic bench``, or ``python -m hypic_apps.bench`` where only torch and transformers are there."""
