"""Configurations of experiments."""
