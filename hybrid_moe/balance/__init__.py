"""Keeping experts equally loaded, and checking that they are."""
