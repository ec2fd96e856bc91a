"""Measurements of what reuse costs in exactness; speed is measured by ``hypic_apps.bench``."""
