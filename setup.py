"""Package metadata; tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
  name='hybrid_moe',
  version='0.1.0',
  description=(
    'Long-context hybrid linear-attention Mixture-of-Experts models in JAX'
  ),
  python_requires='>=3.12',
  packages=find_packages(
    include=['hybrid_moe*', 'pallas_kernels*', 'experiments*']
  ),
  package_data={'pallas_kernels.kda': ['*.json']},
  install_requires=[
    'absl-py>=2.1',
    'array-record>=0.8.3',
    'chex>=0.1.91',
    'flax>=0.12.12',
    'grain>=0.2.18',
    # tensorflow-datasets imports it without declaring it.
    'importlib_resources>=6.4',
    'jax>=0.11.2',
    'matplotlib>=3.10',
    'ml-collections>=1.1.0',
    'numpy>=2.2',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12.8',
    'tensorboardX>=2.6.5',
    'tensorflow-datasets>=4.9.10',
    'tqdm>=4.67',
  ],
  extras_require={
    # Trained tokenizers; bytes need neither.
    'tokenizers': ['sentencepiece>=0.2.3', 'tokenizers>=0.23'],
    'test': [
      # Compiles for TPU on any machine.
      'libtpu>=0.0.52',
      'pytest>=9.0',
      'pytest-xdist>=3.8',
      'ruff>=0.15',
      'sentencepiece>=0.2.3',
      'tokenizers>=0.23',
    ],
    'tpu': ['jax[tpu]>=0.11.2'],
    'cuda': ['jax[cuda13]>=0.11.2'],
  },
)
