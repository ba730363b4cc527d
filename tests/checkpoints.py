"""Tiny random checkpoints of every family, with a tokenizer, and what transformers says to prompts on them.

The weights are scaled so that greedy output follows the prompt and changes from token to token: a model that repeats
one token agrees with anything. Made once per process, in a folder that goes away at exit.
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from families import FAMILIES, SHAPE, VOCAB_SIZE

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SEEDS = {"gemma2": 1, "gemma4": 1}
"""Where the usual one makes a model that repeats itself too often, or one that 8 bits round to either side."""
_CORPUS = [
    "A tercet is a group of three lines of verse. The first line asks, the second answers, and the third goes on.",
    "Every request ends in exactly one terminal message, whatever happens on the way from the client and back.",
    "the cat sat on the mat and the dog ran after the ball until the rain came down and everyone went home again",
    "pages, tokens, layers and heads; queues, steps, slots and leases: one two three four five six seven eight nine",
    "naïve café über straße 東京 Привет мир 🙂 🙃",
]


@functools.cache
def scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="tercet-checkpoints-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def checkpoint(family: str) -> Path:
    """A folder as from the hub, of one of FAMILIES: config.json, model.safetensors, tokenizer files."""
    return make_checkpoint(family, scratch() / family, _SEEDS.get(family, 0))


def make_checkpoint(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint into `folder`; `overrides` go into its config.json."""
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def tiny_config(family: str, **overrides: Any) -> Any:
    kind, settings = FAMILIES[family]
    return kind(**{**SHAPE, **settings, **overrides})


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Layers as loud as the embedding and louder: else the residual stream just repeats the last token.
                gain = 1.0 if "embed_tokens" in name else 4.0
                deviation = gain / parameter.shape[-1] ** 0.5
                parameter.normal_(0.0, deviation, generator=generator)
            elif "layernorm" in name and model.config.model_type.startswith("gemma4"):
                parameter.uniform_(1.5, 2.5, generator=generator)  # as loud as where one is added to weights
            elif name.endswith(("norm.weight", "router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # experts are chosen otherwise than they count
                buffer.uniform_(-0.3, 0.3, generator=generator)
            elif name.endswith("act_fn.beta"):
                buffer.uniform_(0.2, 0.8, generator=generator)
            elif name.endswith(("std_bias", "std_scale")):
                buffer.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("put_min", "put_max")):
                buffer.uniform_(1.0, 2.0, generator=generator).mul_(-1 if name.endswith("min") else 1)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2, generator=generator)


@functools.cache
def tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained on a few lines."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=_CHAT_TEMPLATE, **special)


def random_prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@functools.cache
def reference_model(path: Path) -> Any:
    """The checkpoint in transformers, fp32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference_greedy(path: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers' greedy `generate` appends to each prompt; end-of-sequence ids do not stop it."""
    return greedy(reference_model(path), prompts, num_tokens)


def likeliest(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """What transformers holds for likeliest at each place of the answers, after all that is before it there.

    What equals that is what `reference_greedy` says, found in one pass and not in one for each token. Nothing sees
    the padding behind it.
    """
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, texts))
    with torch.inference_mode():
        logits = reference_model(path)(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
    ids: list[list[int]] = logits.argmax(-1).tolist()
    return [row[len(prompt) - 1 : len(text) - 1] for row, prompt, text in zip(ids, prompts, texts, strict=True)]


def greedy(model: Any, prompts: list[list[int]], num_tokens: int, **more: Any) -> list[list[int]]:
    """The same for a model that is at hand; `more` goes to `generate`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, **settings, **more)
    return [row[longest:].tolist() for row in out]
