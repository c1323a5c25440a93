"""The error that a user can mend."""


class ConfigError(ValueError):
    """A configuration that cannot be run. The message is one line that names the key, the value and the mend."""
