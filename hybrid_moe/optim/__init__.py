"""Optimisers by parameter role, their schedule, and QK-clip."""
