"""Kernels, their XLA forms and the references that define them."""
