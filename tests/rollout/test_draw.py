"""Drawing by seed and position: distribution, log-probs, cuts, and the same on a GPU."""

import math
import subprocess
import sys

import pytest
import torch
from drivetrain_rollout import SamplingParams
from drivetrain_rollout._draw import BITS, WIDTH, Settings, _draw_rows, _splitmix, cut_logits, draw, uniforms
from programs import environment

CPU = torch.device("cpu")


def settings(rows: list[SamplingParams], vocab_size: int, device: torch.device = CPU) -> Settings:
    return Settings.of(rows, vocab_size=vocab_size, device=device)


def params(**options) -> SamplingParams:
    return SamplingParams(max_tokens=1, **options)


def test_splitmix_is_the_published_one():
    def reference(x: int) -> int:
        mask = (1 << 64) - 1
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    inputs = [0, 1, 12345, (1 << 63) - 1]
    found = [value % (1 << 64) for value in _splitmix(torch.tensor(inputs)).tolist()]
    assert found == [reference(x) for x in inputs]
    assert reference(0) == 0xE220A8397B1DCDAF  # the first number of the published generator with seed 0


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniforms_are_uniform_and_independent(along: str):
    count = 200_000
    counted, same = torch.arange(count), torch.full((count,), 3)
    found = uniforms(counted, same) if along == "seeds" else uniforms(same, counted)
    for numbers in found:
        assert numbers.min() >= 0
        assert numbers.max() < 1
        bins = torch.histc(numbers, bins=64, min=0, max=1)
        assert ((bins - count / 64) ** 2 / (count / 64)).sum() < 110  # chi squared of 63 degrees; 1 in 4,000
        assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 0.01
    assert abs(torch.corrcoef(torch.stack(found))[0, 1]) < 0.01


@pytest.mark.parametrize("vocab_size", [48, WIDTH, 2 * WIDTH + 100])
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_tokens_follow_the_distribution_and_carry_its_logprobs(vocab_size: int, temperature: float):
    count = 8_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    rows = [params(temperature=temperature, seed=seed) for seed in range(count)]
    tokens, logprobs = draw(logits.expand(count, -1), settings(rows, vocab_size), torch.full((count,), 9))
    expected = (logits / temperature).log_softmax(-1)
    assert (logprobs - expected[tokens]).abs().max() < 1e-5
    bins = (torch.arange(vocab_size) * 16 // vocab_size).long()
    wanted = torch.zeros(16).index_add_(0, bins, expected.exp()) * count
    found = torch.zeros(16).index_add_(0, bins[tokens], torch.ones(count))
    assert ((found - wanted) ** 2 / wanted).sum() < 45  # chi squared of 15 degrees; 1 in 10,000


def test_a_draw_depends_on_its_seed_and_position_alone():
    logits = torch.randn(6, 3000)
    rows = [params(seed=seed) for seed in (5, 6, 7, 5, 5, 8)]
    positions = torch.tensor([3, 3, 3, 3, 4, 3])
    logits[3] = logits[4] = logits[0]
    tokens, logprobs = draw(logits, settings(rows, 3000), positions)
    assert tokens[3] == tokens[0] != tokens[4]
    alone = draw(logits[2:3], settings(rows[2:3], 3000), positions[2:3])
    assert (alone[0].item(), alone[1].item()) == (tokens[2].item(), logprobs[2].item())


def test_what_has_no_probability_is_never_drawn():
    count = 20_000
    logits = torch.full((count, 2500), -math.inf)
    logits[:, [7, 1500]] = torch.tensor([0.0, math.log(3.0)])
    tokens, _ = draw(logits, settings([params(seed=seed) for seed in range(count)], 2500), torch.zeros(count).long())
    assert set(tokens.tolist()) == {7, 1500}
    assert abs((tokens == 1500).float().mean() - 0.75) < 0.015


def test_greedy_rows_take_the_likeliest_at_temperature_one_and_nan_stays_nan():
    logits = torch.randn(3, 2000)
    logits[2, 11] = math.nan
    rows = [params(temperature=0.0, top_k=5, top_p=0.1), params(temperature=0.5, seed=1), params(seed=2)]
    tokens, logprobs = draw(logits, settings(rows, 2000), torch.zeros(3).long())
    assert tokens[0] == logits[0].argmax()
    assert logprobs[0] == pytest.approx(logits[0].log_softmax(-1).max().item(), abs=1e-5)
    assert logprobs[1] == pytest.approx((logits[1] / 0.5).log_softmax(-1)[tokens[1]].item(), abs=1e-5)
    assert logprobs[2].isnan()


def test_cuts_by_hand():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    left = cut_logits(probs.log().repeat(4, 1), torch.tensor([4, 2, 4, 3]), torch.tensor([1.0, 1.0, 0.6, 0.8]))
    expected = torch.stack(
        [
            probs,
            torch.tensor([0.625, 0.375, 0.0, 0.0]),
            torch.tensor([0.625, 0.375, 0.0, 0.0]),  # 0.5 does not reach 0.6, so 0.3 is kept as well
            torch.tensor([0.625, 0.375, 0.0, 0.0]),  # of 0.95: 0.84 reach 0.8
        ]
    )
    torch.testing.assert_close(left.softmax(-1), expected)


def test_cut_rows_carry_the_logprobs_of_what_was_left():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(400, 1)
    rows = [params(top_k=2, seed=seed) for seed in range(399)] + [params(seed=399)]
    tokens, logprobs = draw(logits, settings(rows, 4), torch.zeros(400).long())
    assert set(tokens[:-1].tolist()) == {0, 1}
    for token, logprob in zip(tokens[:-1].tolist(), logprobs[:-1].tolist(), strict=True):
        assert logprob == pytest.approx(math.log([0.625, 0.375][token]), abs=1e-6)


def mixed(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[SamplingParams], torch.Tensor]:
    count = 64
    logits = torch.randn(count, vocab_size + 7, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, 5], logits[3, 7], logits[9] = -math.inf, math.nan, -math.inf
    logits[9, 40] = 1.0
    rows = [params(temperature=0.0 if i % 7 == 0 else 0.7, seed=i * 7_777_777_777_777) for i in range(count)]
    return logits.to(dtype)[:, :vocab_size], rows, torch.arange(count)


def agree(kernels, device: torch.device) -> None:
    for vocab_size in (48, WIDTH, 3001):
        for dtype in (torch.float32, torch.bfloat16):
            logits, rows, positions = mixed(vocab_size, dtype)
            here, there = settings(rows, vocab_size), settings(rows, vocab_size, device)
            tokens, logprobs = _draw_rows(logits, here.temperature, here, positions)
            found = kernels(logits.to(device), there.temperature, there, positions.to(device), width=WIDTH, bits=BITS)
            sound = torch.arange(64) != 3
            assert (found[0].cpu() == tokens)[
                sound
            ].float().mean() > 0.98  # at the very edge of a token rounding decides
            assert (found[1].cpu() - logprobs)[sound & (found[0].cpu() == tokens)].abs().max() < 1e-5
            assert found[1][3].isnan()


def test_the_kernels_draw_the_same_as_interpreted_by_triton():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, __file__], env=environment() | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_draw_the_same_on_a_gpu():
    from drivetrain_rollout._draw_kernels import draw_rows

    agree(draw_rows, torch.device("cuda"))


if __name__ == "__main__":
    from drivetrain_rollout._draw_kernels import draw_rows

    agree(draw_rows, CPU)
