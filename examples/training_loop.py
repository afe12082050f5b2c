"""Train a tiny model by policy gradient, with headrace for the rollouts.

Each round the engine answers prompts and says how probable each of its tokens was; a trainer in plain torch
makes rewarded answers more probable; and the new weights go into the engine. The reward is the share of
tokens that can be divided by three, so it begins at a third.

    python examples/training_loop.py                      # trainer and engine in one process
    python examples/training_loop.py --form colocated     # the engine sleeps while the trainer works
    python examples/training_loop.py --form separate      # the trainer is another process: shared memory
    python examples/training_loop.py --form broadcast     # the same, by gloo
    python examples/training_loop.py --form quantized     # rollouts with int8 weights

docs/training-loops.md explains it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from headrace import LLM, SamplingParams
from headrace.weight_transfer import SharedWeights, TrainerGroup, described

VOCAB, HIDDEN, INNER, LAYERS, HEADS, THETA, EPS = 96, 64, 128, 2, 4, 10000.0, 1e-5
PROMPTS, ANSWERS, TOKENS = 8, 4, 12
"""Prompts of a round, answers to each, tokens of an answer."""
ROUNDS = 12
LEARNING_RATE = 4e-3
FORMS = ("in-process", "colocated", "separate", "broadcast", "quantized")

Rollout = dict[str, Any]
"""``prompt`` and ``answer`` (token ids), ``logprobs`` of the answer's tokens, ``reward``."""


# -- the model, in plain torch: its modules have the names that the checkpoint has ------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (HIDDEN,), self.weight, EPS)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        length, size = x.shape[1], HIDDEN // HEADS
        frequencies = THETA ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)

        def rotated(heads: Tensor) -> Tensor:
            half = torch.cat([-heads[..., size // 2 :], heads[..., : size // 2]], -1)
            return heads * angles.cos() + half * angles.sin()

        query, key, value = (
            proj(x).unflatten(-1, (HEADS, size)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = functional.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Policy(nn.Module):
    """A Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.model.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.model.norm = Norm()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=HIDDEN**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> log-probabilities of each next token [B, T, VOCAB]."""
        x = self.model.embed_tokens(ids)
        for block in self.model.layers:
            x = block(x)
        return self.lm_head(self.model.norm(x)).log_softmax(-1)


def save(policy: Policy, folder: Path) -> None:
    """Write the policy as a checkpoint that an engine can start with."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(policy.state_dict()), folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "rope_theta": THETA,
        "rms_norm_eps": EPS, "max_position_embeddings": 128, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


# -- the trainer ------------------------------------------------------------------------------------------


class Trainer:
    """REINFORCE with the mean reward of a prompt's answers as its baseline."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = Policy()
        self._optimizer = torch.optim.Adam(self.policy.parameters(), LEARNING_RATE)

    def step(self, rollouts: Sequence[Rollout]) -> None:
        """Make answers that were better than others to the same prompt more probable.

        The engine's rounding, and integers in place of the weights, make its probabilities others than the
        policy's: each token counts as much more or less as the policy would have chosen it (at most twice).
        """
        prompts = torch.tensor([one["prompt"] for one in rollouts])
        answers = torch.tensor([one["answer"] for one in rollouts])
        rewards = torch.tensor([one["reward"] for one in rollouts])
        sampled = torch.tensor([one["logprobs"] for one in rollouts])
        advantage = (rewards.view(-1, ANSWERS) - rewards.view(-1, ANSWERS).mean(1, True)).flatten()
        advantage = advantage / (rewards.std() + 1e-6)
        for _ in range(2):
            logprobs = self.policy(torch.cat([prompts, answers], 1)[:, :-1])[:, -answers.shape[1] :]
            chosen = logprobs.gather(2, answers[..., None])[..., 0]
            ratio = (chosen.detach() - sampled).exp().clamp(max=2.0)
            loss = -(ratio * chosen * advantage[:, None]).mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()


# -- rollouts ---------------------------------------------------------------------------------------------


def rollouts_of(llm: LLM, prompts: Sequence[Sequence[int]], seed: int) -> list[Rollout]:
    """Answers to prompts, with the log-probabilities that the engine chose their tokens by."""
    params = SamplingParams(
        n=ANSWERS, temperature=1.0, max_tokens=TOKENS, logprobs=0, seed=seed, detokenize=False,
        ignore_eos=True,
    )  # fmt: skip
    found = []
    for output in llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params):
        for answer in output.outputs:
            ids = list(answer.token_ids)
            chosen = [at[token].logprob for at, token in zip(answer.logprobs or (), ids)]
            reward = sum(token % 3 == 0 for token in ids) / len(ids)
            found.append(
                {
                    "prompt": list(output.prompt_token_ids or ()),
                    "answer": ids,
                    "logprobs": chosen,
                    "reward": reward,
                }
            )
    return found


def prompts_of(index: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(VOCAB, (PROMPTS, 6), generator=generator).tolist()


# -- the forms: each gives a function that trains on rollouts and puts the new weights into the engine -----

Round = Callable[[Sequence[Rollout]], None]


@contextmanager
def in_process(llm: LLM, seed: int) -> Iterator[Round]:
    """The engine reads the trainer's own tensors."""
    trainer = Trainer(seed)

    def train(rollouts: Sequence[Rollout]) -> None:
        trainer.step(rollouts)
        llm.update_weights(trainer.policy.state_dict())

    yield train


@contextmanager
def colocated(llm: LLM, seed: int) -> Iterator[Round]:
    """The engine gives its memory back while the trainer works. After level 2 it has no weights, and takes
    none from its checkpoint: the trainer's are the next ones."""
    trainer = Trainer(seed)

    def train(rollouts: Sequence[Rollout]) -> None:
        llm.sleep(level=2)
        trainer.step(rollouts)
        llm.wake_up(tags=["weights"])
        llm.update_weights(trainer.policy.state_dict())
        llm.wake_up(tags=["kv_cache"])

    yield train


@contextmanager
def separate(llm: LLM, seed: int, way: str = "shared_memory") -> Iterator[Round]:
    """The trainer is another process. Rollouts go there, and what it says of its weights comes back, as lines
    of JSON; the weights themselves are in shared memory, or come by gloo."""
    command = [sys.executable, __file__, "--trainer", way, "--seed", str(seed)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    if way == "broadcast":
        port = int(child.stdout.readline())
        llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", port, 1, 2))

    def train(rollouts: Sequence[Rollout]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(rollouts) + "\n")
        child.stdin.flush()
        llm.update_weights(json.loads(child.stdout.readline()))

    try:
        yield train
    finally:
        child.stdin.close()
        child.stdout.close()
        child.wait()


def trainer_process(way: str, seed: int) -> None:
    """The other process: a line of rollouts in, a line about the new weights out."""
    trainer, group = Trainer(seed), None
    if way == "broadcast":
        group = TrainerGroup(world_size=2)
        print(group.port, flush=True)
        group.wait()
    with SharedWeights() as shared:
        for line in sys.stdin:
            trainer.step(json.loads(line))
            weights = trainer.policy.state_dict()
            if group is None:
                print(json.dumps(shared.write(weights)), flush=True)
                continue
            # The engine begins to receive when it has read the line.
            print(json.dumps(described(weights)), flush=True)
            group.send(weights)


def run(
    form: str,
    folder: Path,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> list[float]:
    """Train: the mean reward of each round's rollouts."""
    save(Trainer(seed).policy, folder)
    settings: dict[str, Any] = {"quantization": "int8"} if form == "quantized" else {}
    ways = {
        "colocated": colocated,
        "separate": separate,
        "broadcast": lambda llm, seed: separate(llm, seed, "broadcast"),
    }
    rewards = []
    with (
        LLM(
            str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64,
            kv_cache_memory_bytes=4 << 20, enable_sleep_mode=form == "colocated", **settings,
        ) as llm,
        ways.get(form, in_process)(llm, seed) as train,
    ):  # fmt: skip
        for index in range(rounds):
            rollouts = rollouts_of(llm, prompts_of(index), seed=seed * 1000 + index)
            rewards.append(sum(one["reward"] for one in rollouts) / len(rollouts))
            tell(f"round {index}: reward {rewards[-1]:.3f}, weights {llm.weights_version}")
            train(rollouts)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", choices=FORMS, default="in-process")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        trainer_process(options.trainer, options.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(options.form, Path(folder) / "policy", rounds=options.rounds, seed=options.seed)


if __name__ == "__main__":
    main()
