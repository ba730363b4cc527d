"""What the requests of one engine are measured against, from its checkpoint and its limits.

How they are measured is in `request_check.py`.
"""

import sys

import msgspec

from tercet.engine.config import EngineConfig
from tercet.engine.errors import UnsupportedModel
from tercet.engine.first_standing import first_standing
from tercet.engine.generation_defaults import GenerationDefaults, in_place
from tercet.engine.refusal import Refusal
from tercet.engine.request_check import MAX_STOP_IDS, Rules, check_defaults
from tercet.engine.text_codec import TextCodec
from tercet.ipc.process_messages import Limits


def make_rules(codec: TextCodec, limits: Limits, config: EngineConfig) -> Rules:
    """What requests are measured against; says aloud what the checkpoint's defaults change."""
    eos_ids = tuple(token_id for token_id in codec.eos_ids if 0 <= token_id < limits.vocab_size)
    if lost := [token_id for token_id in codec.eos_ids if token_id not in eos_ids]:
        print(
            f"warning: eos_token_id {', '.join(map(str, lost))} ends nothing: the model has {limits.vocab_size} tokens",
            file=sys.stderr,
        )
    if len(eos_ids) > MAX_STOP_IDS:
        raise UnsupportedModel(f"the checkpoint has {len(eos_ids)} end-of-sequence ids; want at most {MAX_STOP_IDS}")
    if codec.pair_template is not None and limits.classifier is None:
        raise UnsupportedModel(
            "--pair-template is for a model that classifies, and this one does not; want --classifier-tokens, a model "
            "with a head, or no template"
        )
    of_text = codec.longest_token, codec.tokenizer is not None
    adapters = {one.name: one for one in first_standing(config).adapters}
    of_checkpoint = codec.defaults if config.generation_config == "auto" else GenerationDefaults()
    own = config.override_generation_config
    defaults = in_place(own, of_checkpoint)
    rules = Rules(limits, defaults, eos_ids, config.seed, *of_text, config.page_size, codec.pooling, adapters)
    try:
        check_defaults(rules)
    except Refusal as refusal:
        whose = "the checkpoint's defaults" if own is None else "--override-generation-config"
        raise UnsupportedModel(f"{whose}: {refusal}") from None
    given = {name: value for name, value in msgspec.structs.asdict(defaults).items() if value is not None}
    if given:
        listed = ", ".join(f"{n} {v:g}" if isinstance(v, float) else f"{n} {v}" for n, v in given.items())
        whose = "of the checkpoint" if own is None else "with --override-generation-config"
        print(f"defaults {whose}: {listed} (what a request says wins)", file=sys.stderr)
    return rules
