"""The one way to reject a configuration."""


class ConfigError(ValueError):
  """A configuration that cannot work; the message names field and value."""


def require(condition: bool, field: str, value: object, accepted: str) -> None:
  """Raises `ConfigError` naming field, value and what is accepted."""
  if not condition:
    raise ConfigError(f'{field}={value!r}: accepted is {accepted}')
