"""Which optimiser a parameter gets, and how a tensor is read as matrices.

The leaf's name alone decides. The table is closed: a parameter under a new
name is an error until somebody decides how it is to be trained.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax

MUON = 'muon'
ADAMW = 'adamw'
ADAMW_NO_DECAY = 'adamw_no_decay'


class Layout(enum.Enum):
  """How the trailing dims of a tensor form a matrix; all others are batch.

  Attributes:
    PLAIN: [..., in, out].
    PER_HEAD: [..., in, H, K], for every head its own in x K.
    FUSED_OUT: [..., in, H, V], one in x (H V).
    FUSED_IN: [..., H, V, out], one (H V) x out.
  """

  PLAIN = enum.auto()
  PER_HEAD = enum.auto()
  FUSED_OUT = enum.auto()
  FUSED_IN = enum.auto()

  def axes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Trailing axes, counted from the end: (batch, rows, columns)."""
    match self:
      case Layout.PLAIN:
        return (), (-2,), (-1,)
      case Layout.PER_HEAD:
        return (-2,), (-3,), (-1,)
      case Layout.FUSED_OUT:
        return (), (-3,), (-2, -1)
      case Layout.FUSED_IN:
        return (), (-3, -2), (-1,)

  @property
  def rank(self) -> int:
    """Trailing dims that the layout speaks of."""
    return sum(len(axes) for axes in self.axes())


@dataclasses.dataclass(frozen=True)
class Role:
  """What is done with a parameter.

  Attributes:
    optimizer: `MUON`, `ADAMW` or `ADAMW_NO_DECAY`.
    rank: dims of one parameter; dims in front of them stack several.
    layout: the matrix that Muon orthogonalises; None for AdamW.
  """

  optimizer: str
  rank: int
  layout: Layout | None = None


def _table() -> dict[str, Role]:
  matrices = {
    # Queries, keys and values of different heads share nothing, so every head
    # is orthogonalised by itself (Kimi K3, section 2.5).
    Layout.PER_HEAD: ('q_proj', 'k_proj', 'v_proj', 'q_up', 'kv_up'),
    Layout.FUSED_OUT: ('g_proj', 'g_up', 'f_up'),
    Layout.FUSED_IN: ('o_proj',),
    Layout.PLAIN: (
      'w_gate',
      'w_up',
      'w_down',
      'router',
      'latent_down',
      'latent_up',
      'b_proj',
      'f_down',
      'g_down',
      'q_down',
      'kv_down',
      'mtp_proj',
    ),
  }
  table = {
    name: Role(MUON, layout.rank, layout)
    for layout, names in matrices.items()
    for name in names
  }
  # Rows of the embeddings are vectors of tokens, not a linear map.
  table |= {name: Role(ADAMW, 2) for name in ('table', 'head')}
  table |= {
    name: Role(ADAMW_NO_DECAY, 1)
    for name in (
      'scale',
      'query',
      'A_log',
      'dt_bias',
      'q_conv',
      'k_conv',
      'v_conv',
    )
  }
  return table


ROLES = _table()


def role_of(path: Sequence[Any], ndim: int) -> Role:
  """Role of the parameter at `path`.

  Args:
    path: key path of the leaf, as `jax.tree_util` gives it.
    ndim: the leaf's dims.

  Returns:
    Its entry in `ROLES`.

  Raises:
    ValueError: the leaf's name is not in the table, or the leaf has fewer dims
      than its role.
  """
  where = jax.tree_util.keystr(tuple(path), simple=True, separator='/')
  name = where.rsplit('/', 1)[-1]
  if name not in ROLES:
    raise ValueError(
      f'parameter {where!r}: no role for the name {name!r}; accepted are '
      f'{sorted(ROLES)}'
    )
  role = ROLES[name]
  if ndim < role.rank:
    raise ValueError(
      f'parameter {where!r}: ndim={ndim}; accepted is >= {role.rank}'
    )
  return role


def optimizer_labels(params: Any) -> Any:
  """Tree of `params`' structure that names the optimiser of every leaf.

  Raises:
    ValueError: as `role_of`.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: role_of(path, leaf.ndim).optimizer, params
  )
