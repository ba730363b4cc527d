"""Masks of grammars, without a process around them."""

import numpy as np

from tercet.engine.grammars import Grammars
from tercet.engine.structured_check import write_grammar
from tercet.ipc.messages import Structured
from tokenizer_process import EOS, byte_tokenizer


def test_ends_that_the_model_does_not_have_are_left_out() -> None:
    """Some checkpoints say -1 where they have none."""
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer.to_str(), [-1, EOS, 10**6], EOS + 1)
    grammars.start(0, write_grammar(Structured(choice=("a",))), [])
    for wanted in (tokenizer.token_to_id("a"), EOS):
        bits = np.unpackbits(np.frombuffer(grammars.mask(0), np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [wanted]
        grammars.accept(0, wanted)
