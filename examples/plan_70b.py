"""How a 70B model gets from 512 GPUs that train it to the engines on the same GPUs; no GPU is needed to find out.

    python examples/plan_70b.py

Learner: FSDP2 over all 512, float32. Engines: 64 of vLLM, tensor parallel over the 8 GPUs of a host, bfloat16. It says
what a sync moves and takes, for two ways to lay the learner out: sharded over all GPUs, or over each host, with copies.
"""

import time

import torch
from drivetrain_sharding import Mesh, make_plan, train_layout, vllm_layout

HOSTS, GPUS = 64, 8
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def main() -> None:
    places = [f"host{host}/gpu{gpu}" for host in range(HOSTS) for gpu in range(GPUS)]
    served = vllm_layout(CONFIG, tp=GPUS, replicas=HOSTS, dtype=torch.bfloat16)
    meshes = {
        "sharded over 512 GPUs": Mesh((("dp", HOSTS * GPUS),)),
        "sharded over 8 GPUs, copied on 64 hosts": Mesh((("copy", HOSTS), ("dp", GPUS))),
    }
    for name, mesh in meshes.items():
        trained = train_layout(CONFIG, mesh, dtype=torch.float32, fsdp="dp")
        start = time.perf_counter()
        plan = make_plan(trained, served, places=(places, places))
        print(f"{name}\n{plan.describe()}\nplanned in {time.perf_counter() - start:.1f} s\n")


if __name__ == "__main__":
    main()
