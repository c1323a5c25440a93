"""Your own task: prompts in a JSONL file, a reward function in a module, a YAML file that names both.

    cd examples/own_task
    drivetrain-ppo run reverse.yaml

Three letters are to be written backwards (`abc>` -> `cba`). `reverse.yaml` names this function as
`reward.function: reverse_reward.py:letters_in_place`. It runs in a process of its own, which is ended and replaced when
a call takes longer than `reward.deadline`; the sample then counts as failed.
"""

from drivetrain_rewards import RewardRequest


def letters_in_place(request: RewardRequest) -> float:
    """The share of the answer's letters that stand where they should; 0 for a response of another length."""
    answer = request.ground_truth or ""
    if len(request.response) != len(answer):
        return 0.0
    return sum(map(str.__eq__, request.response, answer)) / len(answer)
