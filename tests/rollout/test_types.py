"""Types: what they hold, how turns make one sequence, what they refuse."""

import msgspec
import pytest
from drivetrain_rollout import (
    Completion,
    EngineConfig,
    GenerateRequest,
    Rollout,
    RolloutGroup,
    SamplingParams,
    VersionSpan,
)


def completion(prompt: tuple[int, ...], response: tuple[int, ...], logprobs: tuple[float, ...], version: int = 0):
    return Completion(
        request_id="r",
        prompt_token_ids=prompt,
        response_token_ids=response,
        rollout_logprobs=logprobs,
        finish_reason="stop",
        version_spans=(VersionSpan(version, len(response) - 1), VersionSpan(version + 1, 1)),
    )


def test_one_turn_is_prompt_and_response():
    rollout = Rollout(sample_id=1, group_id=0, turns=(completion((5, 6), (7, 2), (-0.5, -0.25)),))
    assert rollout.token_ids == (5, 6, 7, 2)
    assert rollout.response_mask == (False, False, True, True)
    assert rollout.rollout_logprobs == (0.0, 0.0, -0.5, -0.25)


def test_turns_make_one_sequence_with_the_environments_tokens_masked_out():
    first = completion((5, 6), (7, 8), (-0.5, -0.25), version=3)
    second = completion((5, 6, 7, 8, 1, 1), (9,), (-0.125,), version=5)
    rollout = Rollout(sample_id=1, group_id=0, turns=(first, second), score=1.0)
    assert rollout.token_ids == (5, 6, 7, 8, 1, 1, 9)
    assert rollout.response_mask == (False, False, True, True, False, False, True)
    assert rollout.rollout_logprobs == (0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -0.125)
    assert (rollout.min_policy_version, rollout.max_policy_version, rollout.finish_reason) == (3, 6, "stop")


def test_a_turn_that_was_encoded_again_is_refused():
    first = completion((5, 6), (7, 8), (-0.5, -0.25))
    second = completion((5, 6, 78, 1), (9,), (-0.125,))
    with pytest.raises(ValueError, match="sample 4: the prompt of turn 1 does not start with the ids of turn 0"):
        Rollout(sample_id=4, group_id=0, turns=(first, second))


def test_an_empty_response_contributes_no_token():
    rollout = Rollout(sample_id=1, group_id=0, turns=(completion((5, 6), (), ()),))
    assert rollout.token_ids == (5, 6)
    assert rollout.response_mask == (False, False)


def test_a_rollout_without_turns_is_refused():
    with pytest.raises(ValueError, match="sample 4: a rollout has at least one turn"):
        Rollout(sample_id=4, group_id=0, turns=())


def test_a_completion_has_a_logprob_for_each_token():
    with pytest.raises(ValueError, match="'r': 1 rollout_logprobs for 2 response tokens"):
        completion((5,), (6, 7), (-0.5,))


def test_a_group_holds_one_prompt():
    same = [Rollout(sample_id=i, group_id=3, turns=(completion((5, 6), (i,), (-0.5,)),)) for i in range(2)]
    assert len(RolloutGroup(group_id=3, rollouts=tuple(same)).rollouts) == 2
    other = Rollout(sample_id=2, group_id=3, turns=(completion((5, 9), (1,), (-0.5,)),))
    with pytest.raises(ValueError, match="samples 0 and 2 of group 3 have different prompts"):
        RolloutGroup(group_id=3, rollouts=(*same, other))
    with pytest.raises(ValueError, match="sample 0 is of group 3, not 4"):
        RolloutGroup(group_id=4, rollouts=tuple(same))


def test_types_survive_the_wire_unchanged():
    rollout = Rollout(sample_id=1, group_id=0, turns=(completion((5, 6), (7,), (-0.1,)),), score=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rollout), type=Rollout) == rollout
    request = GenerateRequest(
        request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3, stop_token_ids=(2,), seed=7)
    )
    assert msgspec.json.decode(msgspec.json.encode(request), type=GenerateRequest) == request


def test_an_unknown_field_is_an_error_with_its_path():
    with pytest.raises(msgspec.ValidationError, match="unknown field `temprature`"):
        msgspec.convert({"max_tokens": 3, "temprature": 1.0}, SamplingParams)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("device", "tpu", "device 'tpu': use 'cpu' or 'cuda'"),
        ("dtype", "fp32", "dtype 'fp32': use 'auto'"),
        ("memory_fraction", 0.0, "memory_fraction 0.0: use a number above 0 and up to 1"),
        ("max_num_seqs", 0, "max_num_seqs 0: use a number above 0"),
        ("stall_timeout", -1.0, "stall_timeout -1.0: use a number above 0"),
    ],
)
def test_a_config_names_the_value_and_the_mend(field: str, value: object, text: str):
    with pytest.raises(ValueError, match=text):
        EngineConfig(engine="vllm", model="m", **{field: value})
