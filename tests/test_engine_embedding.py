"""What may be asked of a model is what its heads give."""

from dataclasses import replace

import pytest

from tercet.engine.embedding import check_made, made
from tercet.engine.preparation import prepare
from tercet.engine.refusal import Refusal
from tercet.ipc.answers import Classified, Classifier, Embedded, Failed
from tercet.ipc.messages import Classify, ClassifyIds, EmbedIds, Generate
from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Embedding
from test_engine_request_check import RULES
from tokenizer_process import USAGE


def test_what_a_model_gives() -> None:
    """By the heads that it has."""
    size = 100, 64, 1000, "float32", "cpu", 8
    embeds = replace(RULES, limits=Limits(*size, generates=False))
    classifies = replace(RULES, limits=Limits(*size, generates=False, classifier=Classifier(("a", "b"), "softmax")))
    generate, classify, embed = Generate("x", "a"), Classify("x", "a"), EmbedIds("x", b"")
    for request, rules, words in (
        (generate, classifies, "it is to classify, and for embeddings; want one that has it"),
        (generate, embeds, "which makes logits: it is for embeddings; want one that has it"),
        (classify, RULES, r"no score\.weight, the head of a model that classifies"),
        (classify, embeds, r"no score\.weight, the head of a model that classifies"),
    ):
        with pytest.raises(Refusal, match=words) as refusal:
            check_made(request, rules)
        assert refusal.value.code == "not_supported"
    check_made(generate, RULES)
    check_made(classify, classifies)
    for rules in (RULES, classifies, embeds):
        check_made(embed, rules)
    assert prepare(ClassifyIds("x", b""), [5], 1, None, classifies).sampling.embedding == Embedding(
        8, normalize=False, classify=True
    )


def test_how_it_ends() -> None:
    embeds, classifies = Embedding(2, normalize=True), Embedding(8, normalize=False, classify=True)
    assert isinstance(made("x", embeds, b"1234", USAGE), Embedded)
    classified = made("x", classifies, b"1234", USAGE)
    assert isinstance(classified, Classified)
    assert (classified.logits, classified.usage.num_generated_tokens) == (b"1234", 0)
    for how, words in ((embeds, "the embedding has numbers"), (classifies, "logits have numbers")):
        failed = made("x", how, b"", USAGE)
        assert isinstance(failed, Failed)
        assert failed.message.startswith(words)
