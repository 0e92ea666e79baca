"""Kimi Delta Attention: bounded-decay delta-rule linear attention."""

from pallas_kernels.kda.api import IMPLEMENTATIONS, kda

__all__ = ['IMPLEMENTATIONS', 'kda']
