"""The one tree of errors that furcate raises for its users.

FurcateError
├── ConfigError      a setting or command-line value that is not allowed
├── CheckpointError  a target or head checkpoint that cannot be used
├── BuildError       the build itself could not finish (disk, permissions, missing library)
├── EngineMismatch   an engine directory that this installation or machine cannot run
├── RequestError     one request that is refused; other requests are not touched
└── ServerError      the server could not be reached, started, or broke off

Every message is one sentence or two: what was received, what is allowed, what to do.
"""


class FurcateError(Exception):
    """Base of every error meant for a user. The command line prints it on one line and exits with 2."""


class ConfigError(FurcateError):
    """A setting that is not allowed."""


class CheckpointError(FurcateError):
    """A checkpoint that is damaged, incomplete, of an unknown layout, or of another model."""


class BuildError(FurcateError):
    """A build that could not finish."""


class EngineMismatch(FurcateError):
    """An engine that does not fit this machine, this installation, or its own manifest."""


class RequestError(FurcateError):
    """A request that is refused."""


class ServerError(FurcateError):
    """A server that cannot be reached, or that broke off."""
