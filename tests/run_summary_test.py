"""The sample of a run's end."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe import run_summary
from hybrid_moe.config import MeshConfig
from hybrid_moe.data.tokenizer import ByteTokenizer
from hybrid_moe.mesh import make_mesh
from hybrid_moe.run_config import EvalConfig


class SampleTest(parameterized.TestCase):
  @parameterized.parameters(
    ([98, 99], 'abc'), ([98, ByteTokenizer.eos_id, 99], 'ab')
  )
  def test_is_a_document(self, continuation, text):
    tokenizer = ByteTokenizer()
    config = mock.Mock(eval=EvalConfig(sample_prompt='a', sample_tokens=3))
    place = jax.NamedSharding(make_mesh(MeshConfig()), jax.P())
    state = types.SimpleNamespace(
      step=jax.device_put(jnp.int32(0), place), params=None, balance=None
    )

    def sample(model, balance, params, balance_state, prompt, *args, **kwargs):
      self.assertEqual(prompt.tolist(), [tokenizer.bos_id, 97])
      return np.concatenate([prompt, continuation])

    with mock.patch.object(run_summary, 'sample', sample):
      self.assertEqual(run_summary._sample(config, tokenizer, state), text)


if __name__ == '__main__':
  absltest.main()
