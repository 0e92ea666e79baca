"""The decoder: plain functions for the mathematics, Linen for parameters."""
