"""Kimi Delta Attention: bounded-decay delta-rule linear attention."""

from pallas_kernels.kda.api import IMPLEMENTATIONS, kda
from pallas_kernels.kda.custom_vjp import ENTRY_STATES
from pallas_kernels.kda.decode import kda_decode

__all__ = ['ENTRY_STATES', 'IMPLEMENTATIONS', 'kda', 'kda_decode']
