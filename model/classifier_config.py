"""What a checkpoint that classifies says of its labels: `id2label` and what becomes of logits, from its config.json."""

from collections.abc import Mapping
from typing import Any

from tercet.ipc.answers import Activation, Classifier

_OF_PROBLEMS: dict[Any, Activation] = {"multi_label_classification": "sigmoid", "regression": "none"}
_OF_MODULES: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""As sentence-transformers names them."""


def classifier_of(raw: Mapping[str, Any]) -> Classifier:
    """Two labels where nothing is said of them, as in transformers."""
    labels = _labels(raw)
    activation: Activation = "sigmoid" if len(labels) == 1 else "softmax"
    problem = raw.get("problem_type")
    if problem not in (None, "single_label_classification", *_OF_PROBLEMS):
        raise ValueError(f"config.json: problem_type is {problem!r}; supported: {', '.join(map(repr, _OF_PROBLEMS))}")
    activation = _OF_PROBLEMS.get(problem, activation)
    scoring = raw.get("sentence_transformers")
    if isinstance(scoring, Mapping) and (named := scoring.get("activation_fn")) is not None:
        kind = str(named).rpartition(".")[2]
        if kind not in _OF_MODULES:
            raise ValueError(f"config.json: activation_fn is {named!r}; supported: {', '.join(_OF_MODULES)}")
        activation = _OF_MODULES[kind]
    return Classifier(labels, activation)


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    named, count = raw.get("id2label"), raw.get("num_labels")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"config.json: num_labels is {count!r}; want a positive whole number")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(count or 2))
    ids = [str(index) for index in range(len(named))] if isinstance(named, Mapping) else []
    if not ids or set(ids) != set(named) or count not in (None, len(ids)):
        raise ValueError(f"config.json: id2label is {named!r:.200}; want a label for each number from 0 on")
    return tuple(str(named[index]) for index in ids)
