"""The configuration: what is refused, and how clearly."""

import pathlib

import msgspec
import pytest
from drivetrain_ppo.cli import PRESETS, preset_path
from drivetrain_ppo.config import ConfigError, RunConfig, from_dict, load_config, to_yaml


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_load(preset: str) -> None:
    assert load_config(preset_path(preset)).name == preset


def test_yaml_and_overrides(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 7\nactor: {lr: 1e-4}\nrollout:\n  temperature: 0.8\n")
    config = load_config(file, ["trainer.steps=3", "actor.lr=2e-5", "rollout.engine_args={max_logprobs: 2}"])
    assert (config.seed, config.actor.lr, config.rollout.temperature) == (7, 2e-5, 0.8)
    assert config.trainer.steps == 3
    assert config.rollout.engine_args == {"max_logprobs": 2}


def test_round_trip_through_yaml(tmp_path: pathlib.Path) -> None:
    config = load_config(preset_path("quickstart"), ["critic.warmup_steps=5", "data.options={min_terms: 2}"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.step=5", "trainer.step: unknown key; did you mean `trainer.steps`?"),
        ("algoritm.gamma=1", "algoritm: unknown key; did you mean `algorithm`?"),
        ("temperature=0.5", "temperature: unknown key; did you mean `rollout.temperature`?"),
        ("actor.learning_rate=1", "actor.learning_rate: unknown key"),
        ("trainer.steps=many", "trainer.steps: Expected `int`, got `str`"),
        ("actor.lr=fast", "actor.lr: Expected `float`, got `str`"),
        ("algorithm.kl=k9", "algorithm.kl: choose k1, abs, k2, k3, got 'k9'"),
        ("rollout.temperature=0", "rollout.temperature: Expected `float` >= 0.01, got 0"),
        ("algorithm.lam=1.5", "algorithm.lam: Expected `float` <= 1.0, got 1.5"),
        ("actor.lr=-1", "actor: lr is -1"),
        ("trainer.eval_every=0", "trainer.eval_every: Expected `int` >= 1, got 0"),
        ("data.held_out=-5", "data.held_out: Expected `int` >= 1, got -5"),
        ("algorithm.clip_low=3", "algorithm.clip_low: Expected `float` <= 1.0, got 3"),
        ("algorithm.clip_high=.nan", "algorithm.clip_high: Expected `float` >= 0.0, got nan"),
        ("rollout.timeout=.inf", "rollout.timeout: inf is no finite number"),
        ("seed=4294967296", "seed: Expected `int` <= 4294967295, got 4294967296"),
        ("algorithm.minibatches=257", "algorithm.minibatches: 257 parts of the 256 samples"),
        ("seed", "seed: overrides are written key=value"),
        ("seed.deep=1", "seed: Expected `int`, got `group of settings`"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_group_may_be_given_in_part() -> None:
    config = load_config(None, ["actor.max_tokens_per_microbatch=4096"])
    assert (config.actor.lr, config.actor.max_tokens_per_microbatch) == (1e-6, 4096)


def test_override_below_a_value() -> None:
    with pytest.raises(ConfigError, match="`source` holds a value"):
        load_config(preset_path("quickstart"), ["model.source.name=x"])


def test_missing_and_broken_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML") as error:
        load_config(broken)
    assert "\n" not in str(error.value)
    broken.write_text("data: {held_out: 3}\ndata: {held_out: 4}\n")
    with pytest.raises(ConfigError, match="data is given twice"):
        load_config(broken)
    broken.write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected `key: value` lines, got list"):
        load_config(broken)


def test_every_key_of_the_struct_is_known_to_the_checker() -> None:
    assert from_dict(msgspec.to_builtins(RunConfig())) == RunConfig()
