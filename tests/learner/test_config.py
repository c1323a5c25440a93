import pytest
from drivetrain_learner import LearnerConfig


def test_warm_up_then_half_a_cosine() -> None:
    config = LearnerConfig(lr=2.0, warmup_steps=4, schedule="cosine", total_steps=12)
    assert [config.lr_at(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert config.lr_at(8) == pytest.approx(1.0)
    assert config.lr_at(6) == pytest.approx(2.0 * (2 + 2**0.5) / 4)
    assert config.lr_at(12) == config.lr_at(99) == pytest.approx(0.0)


def test_constant_stays() -> None:
    assert {LearnerConfig(lr=3e-6).lr_at(step) for step in (0, 1, 10**6)} == {3e-6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": 1.0, "betas": (0.9, 1.0)}, "betas"),
        ({"lr": 1.0, "eps": 0.0}, "eps is 0.0"),
        ({"lr": 1.0, "max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"lr": 1.0, "schedule": "linear"}, "choose 'constant' or 'cosine'"),
        ({"lr": 1.0, "schedule": "cosine"}, "total_steps is None"),
        ({"lr": 1.0, "schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps is 5"),
        ({"lr": 1.0, "max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch is 0"),
    ],
)
def test_refuses_settings_that_cannot_train(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerConfig(**settings)  # type: ignore[arg-type]
