"""What configuration files share: a dataclass tree as a ConfigDict."""

from ml_collections import config_dict

from hybrid_moe.config import ExperimentConfig, config_to_dict


def to_config_dict(config: ExperimentConfig) -> config_dict.ConfigDict:
  """The form in which flags can override fields."""
  return config_dict.ConfigDict(
    config_to_dict(config), convert_dict=True, type_safe=True
  )
