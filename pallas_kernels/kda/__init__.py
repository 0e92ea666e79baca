"""Kimi Delta Attention: bounded-decay delta-rule linear attention."""

from pallas_kernels.kda.api import IMPLEMENTATIONS, kda
from pallas_kernels.kda.custom_vjp import ENTRY_STATES

__all__ = ['ENTRY_STATES', 'IMPLEMENTATIONS', 'kda']
