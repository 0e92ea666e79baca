"""The KDA reference itself, against float64 loops."""

import pathlib
import runpy

import jax
import numpy as np
from absl.testing import absltest, parameterized

from pallas_kernels.kda import IMPLEMENTATIONS, agreement, arg_specs, kda

SPEC = arg_specs.ArgSpec(2, 37, 2, 4, 32, 32)

discharged = runpy.run_path(
  pathlib.Path(__file__).with_name('tpu_interpreter.py')
)['discharged']


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def recur(q, k, v, g, beta, A_log, dt_bias, h0, softplus=False, double=False):
  """Kimi Linear (arXiv 2510.26692) equation 1, one token and head at a time."""
  rate = np.exp(A_log)[:, None]
  if softplus:
    log_decay = -rate * np.log1p(np.exp(g + dt_bias))
  else:
    log_decay = -5 * sigmoid(rate * (g + dt_bias))
  beta = sigmoid(beta) * (2 if double else 1)
  q = q / np.sqrt(np.sum(q**2, -1, keepdims=True) + 1e-6)
  k = k / np.sqrt(np.sum(k**2, -1, keepdims=True) + 1e-6)
  batch, tokens, heads, _ = v.shape
  o, final = np.zeros_like(v), np.zeros_like(h0)
  for b in range(batch):
    for h in range(heads):
      source = h * q.shape[2] // heads
      state = h0[b, h]
      for t in range(tokens):
        key = k[b, t, source]
        state = np.exp(log_decay[b, t, h])[:, None] * state
        error = v[b, t, h] - key @ state
        state = state + beta[b, t, h] * np.outer(key, error)
        o[b, t, h] = q.shape[-1] ** -0.5 * q[b, t, source] @ state
      final[b, h] = state
  return o, final


def make_inputs():
  return arg_specs.make_inputs(SPEC)


def in_float64(inputs):
  return {name: np.asarray(x, np.float64) for name, x in inputs.items()}


class KdaReferenceTest(parameterized.TestCase):
  @parameterized.parameters(*IMPLEMENTATIONS)
  def test_every_implementation_runs_or_says_why_not(self, implementation):
    inputs = make_inputs()

    @jax.jit
    def run(inputs):
      return kda(
        **inputs, return_final_state=True, implementation=implementation
      )

    if implementation == 'mosaic_gpu':
      with self.assertRaisesRegex(NotImplementedError, 'do not run on cpu'):
        run(inputs)
      return
    with discharged(implementation):
      results = run(inputs)
    expected = recur(**in_float64(inputs))
    bound = 1e-5 if implementation == 'mosaic_tpu' else 1e-6
    for ours, theirs in zip(results, expected):
      self.assertLess(agreement.relative_rms(ours, theirs), bound)

  @parameterized.parameters(
    (dict(allow_neg_eigval=True), dict(double=True)),
    (dict(lower_bound=None), dict(softplus=True)),
  )
  def test_options(self, options, choices):
    inputs = make_inputs()
    ours = jax.jit(
      lambda x: kda(
        **x, **options, return_final_state=True, implementation='reference'
      )
    )(inputs)
    expected = recur(**in_float64(inputs), **choices)
    for x, y in zip(ours, expected):
      self.assertLess(agreement.relative_rms(x, y), 1e-6)

  def test_gradients_equal_finite_differences(self):
    inputs = make_inputs()
    rng = np.random.default_rng(0)
    d_o = rng.normal(size=inputs['v'].shape)
    d_final = rng.normal(size=inputs['h0'].shape)
    _, gradients = agreement.run_with_gradients(
      inputs,
      (d_o.astype(np.float32), d_final.astype(np.float32)),
      {},
      'reference',
    )
    exact = in_float64(inputs)

    def loss(x):
      o, final = recur(**x)
      return np.sum(o * d_o) + np.sum(final * d_final)

    for name, gradient in gradients.items():
      direction = rng.normal(size=gradient.shape)
      ahead = loss({**exact, name: exact[name] + 1e-5 * direction})
      behind = loss({**exact, name: exact[name] - 1e-5 * direction})
      slope = np.sum(np.asarray(gradient, np.float64) * direction)
      scale = np.linalg.norm(gradient)
      self.assertLess(abs(slope - (ahead - behind) / 2e-5) / scale, 1e-4, name)


if __name__ == '__main__':
  absltest.main()
