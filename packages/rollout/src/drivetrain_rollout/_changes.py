"""What happens between responses: other weights, sleep, waking up. ``weights`` says which are served after it."""

from __future__ import annotations

from collections.abc import Callable

from drivetrain_rollout._backend import Backend
from drivetrain_rollout.engine import (
    DigestFunction,
    WeightsRefused,
    WeightsState,
    WeightUpdate,
    WeightWrite,
    Writer,
)


class Changes:
    """Called in the engine's thread, when nothing is sampled.

    Args:
        backend: the model.
        digest, writer: as an engine has them.
        before: called when weights are about to change; from here on nothing is sampled with the old ones.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        digest: DigestFunction | None,
        writer: Writer | None,
        before: Callable[[], None],
    ) -> None:
        self.weights = WeightsState(policy_version=0, digest=None, status="ready")
        self.asleep = False
        self._backend = backend
        self._digest = digest
        self._writer = writer
        self._before = before

    def update(self, update: WeightUpdate) -> WeightsState:
        """Load a complete set of weights, or refuse it."""
        if self.asleep:
            raise RuntimeError("update_weights: the engine sleeps; wake it first")
        arrived = [(name, tensor.detach()) for name, tensor in update.tensors]
        tensors = self._backend.manifest.accept(arrived)
        if self._digest is not None and (digest := self._digest(arrived)) != update.digest:
            raise WeightsRefused(
                f"policy version {update.policy_version}: the digest of what arrived is {digest}, "
                f"that of the update {update.digest}"
            )
        self._drop_weights()
        try:
            self._backend.load(tensors)
        except Exception as error:
            raise WeightsRefused(
                f"policy version {update.policy_version}: loading broke off ({error!r}); nothing is served until a "
                "whole update succeeds"
            ) from error
        self.weights = WeightsState(policy_version=update.policy_version, digest=update.digest, status="ready")
        return self.weights

    def write(self, write: WeightWrite) -> WeightsState:
        """Let the writer put other weights in place of the present ones."""
        if self.asleep:
            raise RuntimeError("write_weights: the engine sleeps; wake it first")
        if self._writer is None:
            raise RuntimeError("write_weights: the engine was made without a writer (info.can_write is False)")
        try:
            act = self._writer(self._backend.parameters(), write.message)
        except Exception as error:
            raise WeightsRefused(f"policy version {write.policy_version}: it cannot be written: {error}") from error
        self._drop_weights()
        try:
            digest = self._backend.write(act)
        except Exception as error:
            raise WeightsRefused(
                f"policy version {write.policy_version}: writing broke off ({error!r}); nothing is served until a "
                "whole update succeeds"
            ) from error
        if digest != write.digest:
            raise WeightsRefused(
                f"policy version {write.policy_version}: the digest of what is in place now is {digest}, that of the "
                f"update {write.digest}; nothing is served until a whole update succeeds"
            )
        self.weights = WeightsState(policy_version=write.policy_version, digest=digest, status="ready")
        return self.weights

    def sleep(self, level: int) -> None:
        """Give the device's memory back."""
        if self.asleep:
            raise RuntimeError("sleep: the engine sleeps already")
        if level == 2:
            self._drop_weights()
        self._backend.sleep(level)
        self.asleep = True

    def wake(self) -> None:
        """Take the device's memory again."""
        if not self.asleep:
            raise RuntimeError("wake: the engine does not sleep")
        self._backend.wake()
        self.asleep = False

    def _drop_weights(self) -> None:
        self._before()
        served = self.weights
        self.weights = WeightsState(policy_version=served.policy_version, digest=served.digest, status="refused")
