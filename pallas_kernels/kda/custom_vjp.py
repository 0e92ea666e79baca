"""Joins a chunked forward and its backward into one differentiable operator."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

# Name of the saved entry states, for rematerialisation policies. The forward
# runs again only if its outputs are needed and are not saved as well.
ENTRY_STATES = 'kda_entry_states'


def join(forward: Callable, backward: Callable) -> Callable:
  """Builds the operator from a forward and a backward.

  The residuals are the arrays, the plan and the entry states; everything else
  is recomputed.

  Args:
    forward: (config, arrays, plan, save_states) -> ((o, final), states).
    backward: (config, arrays, plan, states, d_o, d_final) -> gradients of the
      arrays.

  Returns:
    (config, arrays, plan) -> (o, final), with a custom gradient. The plan holds
    no floating-point array and has no gradient.
  """

  def run(config, arrays, plan):
    outputs, _ = forward(config, arrays, plan, False)
    return outputs

  def run_fwd(config, arrays, plan):
    outputs, states = forward(config, arrays, plan, True)
    states = checkpoint_name(states, ENTRY_STATES)
    return outputs, (arrays, plan, states)

  def run_bwd(config, residuals, grads):
    arrays, plan, states = residuals
    return backward(config, arrays, plan, states, *grads), None

  operator = jax.custom_vjp(run, nondiff_argnums=(0,))
  operator.defvjp(run_fwd, run_bwd)
  return operator
