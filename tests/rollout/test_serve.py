"""The worker's command, and engines by word."""

import asyncio
import subprocess
import sys

import pytest
from drivetrain_rollout import EngineConfig, GenerateRequest, SamplingParams, WeightsRefused, WeightUpdate
from drivetrain_rollout.remote import PROTOCOL, RemoteEngine
from drivetrain_rollout.serve import main
from drivetrain_rollout.start import start_engine
from drivetrain_rollout.testing import load_tensors, sha256_digest, write_tiny_model
from drivetrain_transport import Endpoint
from programs import environment


def test_the_command_serves_an_engine_until_its_controller_leaves(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    with Endpoint.bind(protocol=PROTOCOL) as endpoint:
        command = [sys.executable, "-m", "drivetrain_rollout.serve", "--join", endpoint.address]
        command += ["--digest", "drivetrain_rollout.testing:sha256_digest", "--name", "worker-7"]
        with subprocess.Popen(command, env=environment()) as worker:
            try:
                peer = endpoint.wait_for_peer(60)
                assert peer.name == "worker-7"
                engine = RemoteEngine(peer, EngineConfig(engine="transformers", model=str(folder)))

                async def scenario() -> None:
                    request = GenerateRequest(
                        request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=5)
                    )
                    assert len((await engine.generate(request)).response_token_ids) == 5
                    tensors = load_tensors(folder)
                    with pytest.raises(WeightsRefused, match="digest"):
                        await engine.update_weights(WeightUpdate(policy_version=1, digest="0", tensors=tensors))
                    good = WeightUpdate(policy_version=1, digest=sha256_digest(tensors), tensors=tensors)
                    assert (await engine.update_weights(good)).policy_version == 1
                    await engine.close()

                asyncio.run(asyncio.wait_for(scenario(), 60))
                endpoint.close()
                assert worker.wait(60) == 0
            finally:
                worker.kill()


@pytest.mark.parametrize("text", ["nowhere:digest", "drivetrain_rollout.testing:nothing", "", "os:"])
def test_a_digest_that_is_no_function_is_named(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--join", "tcp://127.0.0.1:1", "--digest", text])
    assert ended.value.code == 2
    assert f"{text!r} names no function" in capsys.readouterr().err


def test_an_unknown_word_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="engine 'sglang': use 'vllm' or 'transformers'"):
        start_engine(EngineConfig(engine="sglang", model="none"))
